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

  // The address of a place; empty values of the query are left out.
  function link(path, query) {
    const kept = Object.entries(query || {}).filter(([, v]) => v !== undefined && v !== null && v !== "");
    const search = new URLSearchParams(kept.map(([k, v]) => [k, String(v)])).toString();
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

  agentgym.router = { parse, link, go, replace, now: () => parse(window.location.hash) };
})();
