// Questions to the server, or to the data inside an exported file.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const TIMEOUT = 60000;
  const RECONNECT = [500, 1000, 2000, 4000, 8000];
  const gone = new Set();

  // What went wrong, in the server's words; `status` 0 where no server answered.
  class ApiError extends Error {
    constructor(message, status) {
      super(message);
      this.status = status;
    }
  }

  const path = (...parts) => `api/${parts.map(encodeURIComponent).join("/")}`;

  async function get(address, query, signal) {
    if (agentgym.embedded) return agentgym.embedded.get(address, query || {});
    const search = new URLSearchParams(agentgym.router.given(query)).toString();
    const limit = AbortSignal.timeout(TIMEOUT);
    let answer;
    let body;
    try {
      answer = await fetch(search ? `${address}?${search}` : address, {
        signal: signal ? AbortSignal.any([signal, limit]) : limit,
        headers: { Accept: "application/json" },
      });
      body = await answer.text();
    } catch (error) {
      if (signal && signal.aborted) throw signal.reason;
      const slow = limit.aborted;
      tell(false);
      throw new ApiError(slow ? `The server did not answer within ${TIMEOUT / 1000} s.` : "The server does not answer.", 0);
    }
    tell(true);
    return read(answer, body);
  }

  function read(answer, text) {
    let body = null;
    try {
      body = JSON.parse(text);
    } catch {
      throw new ApiError(`The server answered ${answer.status} with something that is not JSON.`, answer.status);
    }
    if (!answer.ok) throw new ApiError((body && body.error) || `The server answered ${answer.status}.`, answer.status);
    return body;
  }

  let answering = true;
  function tell(well) {
    if (well === answering) return;
    answering = well;
    for (const listener of gone) listener(!well);
  }

  // Follow a run while it grows: `heard(event)` for each event, `state("open" | "lost")` as the connection comes and goes.
  function follow(run, heard, state) {
    if (agentgym.embedded) return () => {};
    let source = null;
    let tries = 0;
    let timer = 0;
    let closed = false;
    function open() {
      source = new EventSource(`api/events?run=${encodeURIComponent(run)}`);
      source.onopen = () => {
        tries = 0;
        tell(true);
        state("open");
      };
      source.onmessage = (event) => heard(JSON.parse(event.data));
      source.onerror = () => {
        source.close();
        if (closed) return;
        state("lost");
        timer = window.setTimeout(open, RECONNECT[Math.min(tries++, RECONNECT.length - 1)]);
      };
    }
    open();
    return () => {
      closed = true;
      window.clearTimeout(timer);
      source.close();
    };
  }

  const runs = (signal) => get(path("runs"), {}, signal);
  const run = (id, signal) => get(path("runs", id), {}, signal);
  const metrics = (id, after, signal) => get(path("runs", id, "metrics"), { after }, signal);
  const episodes = (id, query, signal) => get(path("runs", id, "episodes"), query, signal);
  const episode = (id, key, signal) => get(path("runs", id, "episodes", key), {}, signal);
  const compare = (a, b, signal) => get(path("compare"), { a, b }, signal);

  agentgym.api = { ApiError, runs, run, metrics, episodes, episode, compare, follow, onGone: (f) => gone.add(f) };
})();
