// One run: its head, and below it what its kind shows.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, api, router, parts } = agentgym;
  const f = agentgym.format;

  function head(run) {
    const id = run.id;
    return [
      h("div", { class: "bar" },
        h("h1", { class: "name" }, parts.name(run.name)),
        h("span", { class: "chip" }, run.kind),
        h("span", { class: "spring" }),
        run.kind === "training" && h("a", { class: "button", href: router.link(["run", id, "episodes"]) }, "Episodes"),
        run.kind === "evaluation" && h("a", { class: "button strong", href: router.link(["run", id, "episodes"]) }, `All ${f.plural(run.episodes, "episode")}`)),
      h("dl", { class: "facts" },
        !parts.isRead(run) ? parts.fact("Success", parts.reading(run.indexing)) : run.headline && parts.fact(run.headline.label.replace(/^./, (letter) => letter.toUpperCase()), f.known(run.headline.low) || !/reward/.test(run.headline.label)
          ? parts.interval(run.headline.value, run.headline.low, run.headline.high) : f.number(run.headline.value)),
        parts.fact("Episodes", f.count(run.episodes)),
        parts.fact("Errors", run.errors ? h("a", { class: "bad", href: router.link(["run", id, "episodes"], { outcome: "error" }) }, f.count(run.errors)) : "0"),
        parts.fact("Began", f.when(run.created)), parts.fact("Last written", f.when(run.updated)),
        parts.fact("Folder", h("code", {}, parts.name(run.path)))),
      [run.problem, ...(run.problems || [])].filter(Boolean).map((text) => h("p", { class: "note bad" }, parts.name(text))),
      run.results && run.results.stopped && h("p", { class: "note" }, "Stopped before all was played: ", h("b", {}, parts.name(run.results.stopped)), ". The same command with the same --out goes on."),
      !parts.isRead(run) && h("p", { class: "note" }, "The episodes are still being read: ", parts.reading(run.indexing), ". Numbers of episodes are of what was read so far; scores come when all are."),
    ];
  }

  function folds(run) {
    return h("div", { class: "folds" },
      run.config && parts.fold("Configuration", parts.pretty(run.config)),
      run.versions && parts.fold("Versions and command", parts.pretty(run.versions)));
  }

  function open(view, route) {
    const id = route.path[1];
    const top = h("div", {});
    const content = h("div", {});
    const bottom = h("div", {});
    const abort = new AbortController();
    const at = { title: id, crumbs: [{ name: id }], changed: (now) => (body && body.changed ? body.changed(now) : false), close };
    let body = null;
    let stop = () => {};
    let timer = 0;
    fill(view, h("p", { class: "muted" }, "Loading…"));

    async function load() {
      const run = await api.run(id, abort.signal);
      parts.keepingFocus(top, () => fill(top, head(run)));
      at.title = run.name;
      if (body) body.update(run);
      else {
        at.crumbs = [{ name: run.name }];
        agentgym.main.named(at);
        body = agentgym.kinds[run.kind](content, run, route);
        fill(bottom, folds(run));
        fill(view, top, content, bottom);
      }
      if (!parts.isRead(run)) {
        window.clearTimeout(timer);
        timer = window.setTimeout(() => load().catch(() => {}), 500);
      }
    }

    function begin() {
      load().then(() => { if (!abort.signal.aborted) stop = agentgym.live.follow(id, load); })
        .catch((error) => error.name !== "AbortError" && fill(view, parts.problem(error, begin)));
    }

    function close() {
      abort.abort();
      window.clearTimeout(timer);
      stop();
      if (body && body.close) body.close();
    }
    begin();
    return at;
  }

  agentgym.kinds = {};
  agentgym.views = { ...agentgym.views, run: open };
})();
