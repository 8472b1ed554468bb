// Following a run: what the header says about it, and who is told when it grows.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { api, parts, h, fill } = agentgym;
  const f = agentgym.format;
  const PACE = 700;

  function say(state, words) {
    const badge = document.getElementById("live");
    badge.hidden = !state;
    badge.className = `live ${state || ""}`;
    fill(badge, state && [h("i", { class: "dot" }), words]);
  }

  // Calls `grown()` when the run has more than before, at most every PACE milliseconds. Returns a function that stops.
  function follow(id, grown) {
    const grow = parts.paced(PACE, grown);
    let before = null;
    const stop = api.follow(id, (event) => {
      const now = JSON.stringify([event.episodes, event.metrics, event.rewritten, event.live]);
      // A run that is written may have grown between what the page has read and the first event.
      if (before === null ? event.live : now !== before) grow();
      before = now;
      if (event.live) say("on", `live · ${f.plural(event.episodes, "episode")}`);
      else say(null);
    }, (state) => {
      if (state === "lost") say("lost", "reconnecting…");
      else if (before !== null) grow();
    });
    return () => { stop(); say(null); };
  }

  agentgym.live = { follow };
})();
