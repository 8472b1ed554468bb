// A training run: its curves, alone or with those of other runs over them.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, written, api, router, parts, Chart } = agentgym;
  const f = agentgym.format;
  const USUAL = ["eval.success", "train.reward", "train.success", "sft.loss", "train.update.loss", "train.update.gap_mean", "train.update.entropy", "train.update.grad_norm", "train.step_seconds"];
  const NAMES = {
    "eval.success": "Success on held-out tasks", "train.reward": "Training reward", "train.success": "Training success", "sft.loss": "Warm-start loss",
    "train.update.loss": "Policy loss", "train.update.gap_mean": "Log-probability gap", "train.update.entropy": "Entropy",
    "train.update.grad_norm": "Gradient norm", "train.step_seconds": "Seconds of a step",
    "train.update.gap_by_lag.*.mean": "Log-probability gap by lag", "train.update.gap_by_lag.*.k1": "KL(engine || trainer) by lag, k1",
    "train.update.gap_by_lag.*.k3": "KL(engine || trainer) by lag, k3", "train.update.gap_by_lag.*.ess": "Effective sample size by lag",
  };
  // Drawn by themselves where they are more than zeros.
  const TELLING = [
    "held_out.loss", "held_out.accuracy", ...["sft", "preference", "reward_model"].flatMap((kind) => ["loss", "accuracy", "chosen", "rejected", "grad_norm"].map((key) => `${kind}.${key}`)),
    "eval.context", ...["mixed_groups", "truncated", "context", "summaries", "health.length", "health.length_max", "health.reward_spread", "health.repetition", "health.same", "critic.explained_variance", "prm.accuracy",
      "update.kl_reference", "update.staleness", ...["mean", "k1", "k3", "ess"].map((key) => `update.gap_by_lag.*.${key}`), "selection.dropped_groups", "selection.dropped", "rollout_seconds", "score_seconds", "learn_seconds", "sync_seconds"].map((key) => `train.${key}`),
  ];
  const SHARES = new Set(["success", "accuracy", "mixed_groups", "truncated", "context", "ess"]);
  const BANDS = { success: ["low", "high"], reward: ["reward_low", "reward_high"] };
  const HIDDEN = new Set(["step", "steps", "elapsed", "kind"]);

  // The numbers of a record by their full names: {"train.update.loss": 0.1}.
  function numbers(record, prefix = record.kind || "all", out = {}) {
    for (const [key, value] of Object.entries(record)) {
      if (f.known(value)) { if (!HIDDEN.has(key)) out[`${prefix}.${key}`] = value; }
      else if (value && typeof value === "object" && !Array.isArray(value)) numbers(value, `${prefix}.${key}`, out);
    }
    return out;
  }

  function keysOf(records) {
    const keys = new Set();
    for (const record of records) for (const key of Object.keys(numbers(record))) keys.add(key.replace(/(gap_by_lag)\.\d+/, "$1.*"));
    return [...keys].sort();
  }

  // The lines of a key: one, or with a star in it one for each lag.
  function linesOf(run, key, axis, colour) {
    if (!key.includes("*")) return [{ name: run.name, colour, points: pointsOf(run.records, key, axis) }];
    const lags = [...new Set(run.records.flatMap((record) => Object.keys((record.update || {}).gap_by_lag || {})))].sort((a, b) => a - b);
    return lags.map((lag) => ({ name: `${colour ? `${run.name}, ` : ""}lag ${lag}`, colour: colour + Number(lag), points: pointsOf(run.records, key.replace("*", lag), axis) }));
  }

  function pointsOf(records, key, axis) {
    const [kind, ...rest] = key.split(".");
    const band = rest.length === 1 && BANDS[rest[0]];
    const out = [];
    for (const record of records) {
      if ((record.kind || "all") !== kind) continue;
      const y = rest.reduce((value, name) => (value ? value[name] : undefined), record);
      if (f.known(y) && f.known(record[axis])) out.push(band ? [record[axis], y, record[band[0]], record[band[1]]] : [record[axis], y]);
    }
    return out.sort((a, b) => a[0] - b[0]);
  }

  // The run in a few numbers.
  function facts(records) {
    const of = (kind, name) => records.filter((r) => r.kind === kind && f.known(r[name]));
    const [evals, held, steps, file] = [of("eval", "success"), of("held_out", "loss"), of("train", "episodes"), records.filter((r) => f.known(r.epoch))];
    const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
    const most = (rows, value) => rows.reduce((best, row) => (best && value(best) >= value(row) ? best : row), null);
    const success = (words, row) => parts.fact(`Held-out success, ${words}`, parts.interval(row.success, row.low, row.high));
    const loss = (words, row) => parts.fact(`Held-out loss, ${words}`, `${f.number(row.loss)}${f.known(row.accuracy) ? `, accuracy ${f.percent(row.accuracy)}` : ""}`);
    const best = most(evals, (row) => row.success);
    const gaps = steps.map((row) => (row.update || {}).gap_mean).filter(f.known);
    const [tokens, again] = [sum(steps, "sampled_tokens"), sum(steps, "retried")];
    // Not of the rollouts' seconds: with staleness they lie in the steps before.
    const seconds = steps.reduce((total, row) => total + (row.tokens_per_second ? row.sampled_tokens / row.tokens_per_second : 0), 0);
    const end = most(records, (row) => row.elapsed || 0);
    return [
      best && [success("start", evals[0]), success("end", evals.at(-1)), success(`best, after step ${best.step}`, best)],
      held.length > 0 && [loss("start", held[0]), loss("end", held.at(-1))],
      end && parts.fact("Time", f.seconds(end.elapsed)),
      file.length > 0 && [parts.fact("Optimizer steps", `${f.count(file.length)}, ${f.count(file.filter((row) => row.skipped).length)} skipped`), parts.fact("Learned tokens", f.count(sum(file, "tokens")))],
      steps.length > 0 && parts.fact("Training episodes", `${f.count(sum(steps, "episodes"))}, ${f.count(sum(steps, "failed"))} failed${again ? `, ${f.count(again)} run again` : ""}`),
      tokens > 0 && parts.fact("Sampled tokens", `${f.count(tokens)}${seconds ? `, ${f.count(tokens / seconds)} a second` : ""}`),
      gaps.length > 0 && parts.fact("Engine gap, largest step mean", `${Math.max(...gaps).toExponential(1)} nats a token`),
    ];
  }

  const number = (name, title, show) => ({ name, title, right: true, of: (row) => row[name], show: (row) => show(row[name]) });
  const EVALUATION = [
    number("step", "Step", f.count), { ...number("success", "Success"), measure: true, show: (row) => parts.interval(row.success, row.low, row.high) },
    number("reward", "Reward", (x) => f.fixed(x, 3)), number("turns", "Turns", (x) => f.fixed(x, 1)), number("episodes", "Episodes", f.count), number("failed", "Failed", f.count),
  ];

  class Training {
    constructor(holder, run, route) {
      Object.assign(this, { run, runs: [], charts: new Map(), asked: false });
      this.axis = h("select", { "aria-label": "Horizontal axis" }, h("option", { value: "step" }, "by step"), h("option", { value: "elapsed" }, "by time"));
      this.keys = h("select", { "aria-label": "Add a chart" });
      this.others = h("select", { "aria-label": "Add a run to the charts" });
      this.legend = h("div", { class: "legend" });
      this.grid = h("div", { class: "charts" });
      this.facts = h("dl", { class: "facts" });
      this.evaluations = h("div", {});
      this.steps = h("div", {});
      const change = (what) => () => this.change(what);
      this.axis.addEventListener("change", change("axis"));
      this.keys.addEventListener("change", change("key"));
      this.others.addEventListener("change", change("run"));
      fill(holder, this.facts, h("div", { class: "bar sub" }, h("h2", {}, "Curves"), this.axis, this.keys, this.others), this.legend, this.grid, this.evaluations, this.steps);
      this.changed({ path: route.path, query: route.query });
      this.offer();
    }

    close() {
      for (const chart of this.charts.values()) chart.close();
    }

    // What the address says: other runs, charts, the axis.
    changed(now) {
      if (now.path[1] !== this.run.id || now.path.length !== 2) return false;
      const list = (text) => (text ? text.split(" ").filter(Boolean) : []);
      this.query = now.query;
      const ids = [this.run.id, ...list(now.query.with)];
      this.runs = ids.map((id) => this.runs.find((r) => r.id === id) || { id, name: id === this.run.id ? this.run.name : id, records: [], next: 0 });
      this.extra = list(now.query.charts);
      this.axis.value = now.query.axis || "step";
      this.read();
      return true;
    }

    change(what) {
      const query = { ...this.query };
      if (what === "axis") query.axis = this.axis.value === "step" ? "" : this.axis.value;
      if (what === "key" && this.keys.value) query.charts = [...this.extra, this.keys.value].join(" ");
      if (what === "run" && this.others.value) query.with = [query.with, this.others.value].filter(Boolean).join(" ");
      router.go(["run", this.run.id], query);
    }

    async offer() {
      const { runs } = await api.runs().catch(() => ({ runs: [] }));
      this.known = runs.filter((run) => run.kind === "training");
      this.draw();
    }

    async read() {
      try {
        await Promise.all(this.runs.map(async (run) => {
          const from = run.next;
          const answer = await api.metrics(run.id, from);
          if (run.next !== from) return;  // another read was faster
          if (from && (answer.next < from || answer.rewritten !== run.rewritten)) {  // back to a checkpoint: the last records are others now
            Object.assign(run, { records: [], next: 0 });
            return this.read();
          }
          run.records.push(...answer.records);
          Object.assign(run, { next: answer.next, rewritten: answer.rewritten });
        }));
      } catch (error) {
        if (!this.charts.size) return void fill(this.grid, parts.problem(error, () => this.read()));
      }
      this.draw();
      return undefined;
    }

    update(run) {
      this.run = run;
      return this.read();
    }

    draw() {
      for (const run of this.runs) run.name = ((this.known || []).find((k) => k.id === run.id) || run).name;
      const keys = keysOf(this.runs.flatMap((run) => run.records));
      const telling = TELLING.filter((key) => keys.includes(key) && this.runs.some((run) => linesOf(run, key, "step", 0).some((line) => line.points.some((point) => point[1]))));
      const shown = [...new Set([...USUAL.filter((key) => keys.includes(key)), ...telling, ...this.extra])];
      if (!keys.length) fill(this.grid, parts.empty("No measurements yet.", "Curves appear with the first step. A run is started by `agent-train +env=frozen_lake`."));
      for (const [key, chart] of this.charts) {
        if (!shown.includes(key) || chart.xName !== this.axis.value) { chart.close(); chart.element.remove(); this.charts.delete(key); }
      }
      if (keys.length && !this.charts.size) fill(this.grid);
      for (const key of shown) this.chart(key);
      this.fillMenus(keys, shown);
      fill(this.facts, facts(this.runs[0].records));
      this.drawEvaluations(this.runs[0].records.filter((record) => record.kind === "eval"));
      this.drawLegend();
      this.drawSteps();
    }

    chart(key) {
      if (!this.charts.has(key)) {
        const name = key.split(".").at(-1);
        const tools = this.extra.includes(key) && h("button", { class: "plain", type: "button", "aria-label": `Remove the chart ${key}`,
          on: { click: () => router.go(["run", this.run.id], { ...this.query, charts: this.extra.filter((k) => k !== key).join(" ") }) } }, "×");
        const chart = new Chart({ title: NAMES[key] || key, percent: SHARES.has(name), xName: this.axis.value, tools });
        chart.element.dataset.key = key;
        this.charts.set(key, chart);
        this.grid.append(chart.element);
      }
      this.charts.get(key).update(this.runs.flatMap((run, colour) => linesOf(run, key, this.axis.value, colour)).filter((s, i) => s.points.length || !i));
    }

    fillMenus(keys, shown) {
      const option = (value, name) => h("option", { value }, name);
      const left = keys.filter((key) => !shown.includes(key));
      if (this.keys.options.length !== left.length + 1) fill(this.keys, option("", "Add a chart…"), left.map((key) => option(key, key)));
      const free = (this.known || []).filter((run) => !this.runs.some((r) => r.id === run.id));
      fill(this.others, option("", free.length ? "Add a run…" : "No other training run"), free.map((run) => option(run.id, run.name)));
      this.others.disabled = !free.length;
      this.keys.value = this.others.value = "";
    }

    drawLegend() {
      const without = (id) => ({ ...this.query, with: this.runs.slice(1).map((r) => r.id).filter((r) => r !== id).join(" ") });
      fill(this.legend, this.runs.length > 1 && this.runs.map((run, i) => h("span", { class: `key c${i % 6}` }, h("i", { class: "swatch" }), written(run.name),
        i > 0 && h("a", { class: "plain", href: router.link(["run", this.run.id], without(run.id)), "aria-label": `Remove ${run.name}` }, "×"))));
    }

    drawEvaluations(rows) {
      if (this.table) this.table.update(rows);
      else if (rows.length) {
        this.table = parts.table("Held-out evaluations", EVALUATION, rows);
        fill(this.evaluations, h("h2", {}, "Held-out evaluations"), this.table.element);
      }
    }

    drawSteps() {
      const steps = this.run.steps || [];
      if (!steps.length || this.drawnSteps === steps.length) return;
      this.drawnSteps = steps.length;
      const list = (kind) => steps.filter((s) => s.kind === kind).map((s) => h("a", { class: "step", href: router.link(["run", this.run.id, "episodes"], { cell: s.cell }) }, f.count(s.step)));
      const row = (title, kind) => { const links = list(kind); return links.length > 0 && h("div", { class: "steps" }, h("b", {}, title), links); };
      fill(this.steps, h("h2", {}, "Episodes by step"), row("Evaluation", "eval"), row("Training", "train"));
    }
  }

  agentgym.kinds.training = (holder, run, route) => new Training(holder, run, route);
})();
