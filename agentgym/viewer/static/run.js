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
        !parts.isRead(run) ? parts.fact("Success", parts.reading(run.indexing)) : run.headline && parts.fact(run.headline.label.replace(/^./, (letter) => letter.toUpperCase()), parts.interval(run.headline.value, run.headline.low, run.headline.high)),
        parts.fact("Episodes", f.count(run.episodes)),
        parts.fact("Errors", run.errors ? h("a", { class: "bad", href: router.link(["run", id, "episodes"], { outcome: "error" }) }, f.count(run.errors)) : "0"),
        used(run),
        parts.fact("Began", f.when(run.created)), parts.fact("Last written", f.when(run.updated)),
        parts.fact("Folder", h("code", {}, parts.name(run.path)))),
      [run.problem, ...(run.problems || [])].filter(Boolean).map((text) => h("p", { class: "note bad" }, parts.name(text))),
      agentgym.embedded && agentgym.embedded.home && agentgym.embedded.note && h("p", { class: "note" }, parts.code(agentgym.embedded.note)),
      run.results && run.results.stopped && h("p", { class: "note" }, "Stopped before all was played: ", h("b", {}, parts.name(run.results.stopped)), `, with ${f.plural(missing(run), "episode")} not played. The same command with the same --out goes on.`),
      muchCut(run),
      !parts.isRead(run) && h("p", { class: "note" }, "The episodes are still being read: ", parts.reading(run.indexing), ". Numbers of episodes are of what was read so far; scores come when all are."),
    ];
  }

  const cellsOf = (run) => (run.results && run.results.cells) || [];
  const missing = (run) => cellsOf(run).reduce((sum, cell) => sum + Math.max(0, cell.planned - cell.episodes - cell.errors), 0);

  // What an evaluation took, as its results count it.
  function used(run) {
    const cells = cellsOf(run);
    const sum = (of) => cells.reduce((total, cell) => total + (of(cell) || 0), 0);
    const [read, wrote] = ["prompt_tokens", "completion_tokens"].map((kind) => sum((cell) => (cell.tokens || {})[kind]));
    const requests = sum((cell) => cell.requests);
    const again = sum((cell) => Object.values(cell.retries || {}).reduce((a, b) => a + b, 0));
    return [
      cells.length > 0 && parts.fact("Time", f.seconds(run.results.seconds)),
      read + wrote > 0 && parts.fact("Tokens", `${f.short(read + wrote)}, ${f.short(wrote)} written`),
      requests > 0 && parts.fact("Requests", `${f.count(requests)}, ${f.count(again)} sent again`),
      cells.some((cell) => f.known(cell.cost)) && parts.fact("Cost", f.money(sum((cell) => cell.cost))),
    ];
  }

  // Where so many answers were cut, scores measure the limits rather than the model.
  const muchCut = (run) => cellsOf(run).filter((cell) => cell.cut > 0.05 * (cell.episodes + cell.errors)).map((cell) =>
    h("p", { class: "note bad" }, parts.name(cell.name), `: ${f.count(cell.cut)} of ${f.plural(cell.episodes + cell.errors, "episode")} were cut.`));

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
