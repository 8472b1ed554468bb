// Two runs: their paired differences, and two episodes of one task side by side.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, api, router, parts, episode } = agentgym;
  const f = agentgym.format;
  const SHOWN = { success: (x) => f.percent(x), reward: (x) => f.fixed(x, 3), turns: (x) => f.fixed(x, 1), tokens: (x) => f.count(x) };
  const STEPS = { success: (x) => `${signed(100 * x, 1)} points`, reward: (x) => signed(x, 3), turns: (x) => signed(x, 1), tokens: (x) => signed(x, 0) };

  const signed = (x, digits) => (f.known(x) ? `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x).toFixed(digits)}` : "–");

  // A training run is compared by its last evaluation, "step 10".
  const cellName = (cell, agent) => (/^step \d+$/.test(agent) ? `eval-${agent.slice(5).padStart(6, "0")}` : `${cell.env}${cell.split && cell.split !== "test" ? `/${cell.split}` : ""}@${agent}`);

  // b minus a with its interval, around a zero in the middle; `scale` is what reaches the ends.
  function difference(name, measure, scale) {
    const { mean, low, high } = measure;
    const at = (x) => `${50 + 50 * Math.max(-1, Math.min(1, x / scale))}%`;
    const known = f.known(low) && f.known(high);
    const sure = known && (low > 0 || high < 0) && ["success", "reward"].includes(name);
    const words = known ? `${STEPS[name](mean)}, 95% interval ${STEPS[name](low)} to ${STEPS[name](high)}` : STEPS[name](mean);
    return h("span", { class: "interval", title: words },
      h("b", { class: sure ? (mean > 0 ? "better" : "worse") : "" }, STEPS[name](mean)),
      h("span", { class: "track around", "aria-hidden": "true" }, h("span", { class: "zero" }),
        known && h("span", { class: "band", css: { left: at(low), width: `${parseFloat(at(high)) - parseFloat(at(low))}%` } }),
        h("span", { class: "dot", css: { left: at(mean) } })),
      h("span", { class: "range" }, known ? `${STEPS[name](low).replace(" points", "")} to ${STEPS[name](high).replace(" points", "")}` : ""));
  }

  // Of success and reward, more is better; of turns and tokens nobody knows.
  function tally(measure) {
    const judged = ["success", "reward"].includes(measure.name);
    const [more, same, less] = judged ? ["won", "tied", "lost"] : ["more", "same", "fewer"];
    return h("span", { class: "tally", title: "tasks on which the second run has more, the same, less" },
      h("span", { class: judged && measure.wins ? "better" : "muted" }, `${measure.wins} ${more}`), h("span", { class: "muted" }, `${measure.ties} ${same}`), h("span", { class: judged && measure.losses ? "worse" : "muted" }, `${measure.losses} ${less}`));
  }

  const scaleOf = (name, measure) => (name === "success" ? 1 : Math.max(1e-9, ...["mean", "low", "high"].map((k) => Math.abs(measure[k] || 0))));

  function measures(cell) {
    const rows = Object.entries(cell.measures).filter(([name]) => SHOWN[name]).map(([name, measure]) => ({ name, ...measure }));
    if (!rows.length) return null;
    const right = (name, title, show, narrow) => ({ name, title, show, right: true, narrow });
    return parts.table(`Differences on ${cell.env}`, [
      { name: "name", title: "Mean of", show: (r) => r.name }, right("a", "First", (r) => SHOWN[r.name](r.a)), right("b", "Second", (r) => SHOWN[r.name](r.b)),
      { ...right("difference", "Second − first", (r) => difference(r.name, r, scaleOf(r.name, r))), measure: true },
      right("tally", "Tasks", tally), right("p", "p", (r) => f.number(Number(r.p.toPrecision(2))), false),
    ], rows).element;
  }

  function changed(cell, query) {
    if (!cell.changed.length) return null;
    const side = (task) => router.link(["side"], { a: query.a, b: query.b, ca: cellName(cell, cell.agent_a), cb: cellName(cell, cell.agent_b), task });
    const right = (name, title, of, show) => ({ name, title, of, show, right: true });
    const table = parts.table(`Tasks that changed on ${cell.env}`, [
      { name: "task", title: "Task", of: (r) => r.task, show: (r) => h("a", { class: "open", href: side(r.task) }, h("bdi", {}, parts.name(r.task))) },
      right("success", "Success", (r) => r.success_b - r.success_a, (r) => change(r.success_a, r.success_b, f.percent)),
      right("reward", "Reward", (r) => r.reward_b - r.reward_a, (r) => change(r.reward_a, r.reward_b, f.number)),
    ], cell.changed);
    return h("details", { class: "fold", open: true }, h("summary", {}, cell.changed.length < 10 ? f.plural(cell.changed.length, "task") + " changed" : "The tasks that changed most"), table.element);
  }

  const change = (a, b, show) => [show(a), h("span", { class: "muted" }, " → "), h("span", { class: b > a ? "better" : b < a ? "worse" : "" }, show(b))];

  function section(cell, query) {
    const counts = (episodes, errors) => [f.plural(episodes, "episode"), errors ? h("span", { class: "bad" }, `, ${f.plural(errors, "error")}`) : ""];
    return h("section", { class: "card compared" },
      h("div", { class: "bar" }, h("h2", {}, parts.name(cell.env)), cell.split && cell.split !== "test" && h("span", { class: "chip" }, cell.split),
        h("span", { class: "muted" }, parts.name(cell.agent_a), " (", counts(cell.episodes_a, cell.errors_a), ") and ", parts.name(cell.agent_b), " (", counts(cell.episodes_b, cell.errors_b), ")")),
      cell.notes.map((note) => h("p", { class: "note small" }, parts.name(note))),
      measures(cell), changed(cell, query));
  }

  function open(view, route) {
    const { a, b } = route.query;
    const abort = new AbortController();
    const at = { title: "Comparison", crumbs: [{ name: "comparison" }], close: () => abort.abort(), changed: () => false };
    const name = (id) => h("a", { href: router.link(["run", id]) }, h("bdi", {}, parts.name(id)));

    async function load() {
      fill(view, h("p", { class: "muted" }, "Comparing…"));
      try {
        const found = await api.compare(a, b, abort.signal);
        const swap = h("a", { class: "button", href: router.link(["compare"], { a: b, b: a }) }, "Swap");
        const alone = (cells, id) => cells.length > 0 && h("p", { class: "note small" }, "Only in ", parts.name(id), ": ", parts.name(cells.join(", ")));
        fill(view, h("div", { class: "bar" }, h("h1", { class: "name" }, name(a), h("span", { class: "muted" }, " and "), name(b)), h("span", { class: "spring" }), swap),
          h("p", { class: "muted lead" }, "Paired by task: differences are of the second run, ", parts.name(b), ", minus the first, with 95% intervals."),
          found.cells.length ? found.cells.map((cell) => section(cell, route.query)) : parts.empty("These runs have no environment in common.", "Choose two runs that play the same tasks."),
          alone(found.only_a, a), alone(found.only_b, b));
      } catch (error) {
        if (error.name !== "AbortError") fill(view, parts.problem(error, load));
      }
    }
    load();
    return at;
  }

  // The episodes of one task in a run, by sample.
  async function samples(run, cell, task, signal) {
    const { rows } = await api.episodes(run, { cell, task, limit: 200 }, signal);
    return rows.slice().sort((x, y) => x.sample - y.sample);
  }

  async function column(run, rows, sample, side, signal) {
    const row = rows.find((r) => r.sample === sample) || rows[0];
    if (!row) return h("div", {}, h("h2", {}, h("bdi", {}, parts.name(run))), parts.empty("This run has no such episode.", "It may have been left out or not be played yet."));
    const answer = await api.episode(run, row.key, signal);
    return h("div", { class: "column" }, h("h2", { class: "name" }, h("a", { href: router.link(["run", run, "episode", row.key]) }, h("bdi", {}, parts.name(run)))),
      h("div", { class: "bar" }, parts.mark(parts.outcomeOf(row)), h("span", { class: "muted" }, parts.name(row.cell), ` · sample ${row.sample}`)),
      episode.facts(answer), episode.failure(answer), episode.conversation(answer, { side }));
  }

  function beside(view, route) {
    const q = route.query;
    const abort = new AbortController();
    const back = router.link(["compare"], { a: q.a, b: q.b });
    const sample = Number(q.sample || 0);

    async function load() {
      fill(view, h("p", { class: "muted" }, "Loading…"));
      try {
        const [one, two] = await Promise.all([samples(q.a, q.ca, q.task, abort.signal), samples(q.b, q.cb, q.task, abort.signal)]);
        const numbers = [...new Set([...one, ...two].map((row) => row.sample))].sort((x, y) => x - y);
        const columns = await Promise.all([column(q.a, one, sample, "a", abort.signal), column(q.b, two, sample, "b", abort.signal)]);
        const choices = numbers.map((n) => h("a", { class: "step", href: router.link(["side"], { ...q, sample: n || "" }), "aria-current": n === sample ? "true" : null }, n));
        fill(view, h("div", { class: "bar" }, h("h1", { class: "name" }, h("bdi", {}, parts.name(q.task))), h("span", { class: "spring" }), numbers.length > 1 && h("span", { class: "steps" }, h("span", { class: "muted" }, "Sample"), choices)),
          h("div", { class: "side" }, columns));
      } catch (error) {
        if (error.name !== "AbortError") fill(view, parts.problem(error, load));
      }
    }
    load();
    return { title: q.task, crumbs: [{ name: "comparison", href: back }, { name: q.task }], back, close: () => abort.abort() };
  }

  agentgym.views = { ...agentgym.views, compare: open, side: beside };
})();
