// The address after "#" is the whole state of the page: #/run/ID/episodes?cell=C&sort=reward
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});

  // {"path": ["run", "ID", "episodes"], "query": {"cell": "C"}}
  function parse(hash) {
    const [path, query] = String(hash || "").replace(/^#\/?/, "").split(/\?(.*)/s);
    const parts = path.split("/").filter(Boolean).map(decode);
    return { path: parts.length ? parts : home(), query: Object.fromEntries(new URLSearchParams(query || "")) };
  }

  // A report opens at its run.
  const home = () => (agentgym.embedded && agentgym.embedded.home ? ["run", agentgym.embedded.home] : ["runs"]);

  function decode(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  }

  // What a query asks for; empty values are left out.
  const given = (query) => Object.entries(query || {}).filter(([, v]) => v !== undefined && v !== null && v !== "");

  // The address of a place.
  function link(path, query) {
    const search = new URLSearchParams(given(query)).toString();
    return `#/${path.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
  }

  function go(path, query) {
    window.location.hash = link(path, query);
  }

  // Change the address without a new entry for the Back button, as typing does.
  function replace(path, query) {
    window.history.replaceState(window.history.state, "", link(path, query));
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }

  agentgym.router = { parse, given, link, go, replace, now: () => parse(window.location.hash) };
})();
