// One episode, turn by turn, or token by token.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, api, router, parts, tokens } = agentgym;
  const f = agentgym.format;
  const AROUND = 50;

  function bar(turn, longest) {
    const share = (x) => `${(100 * (x || 0)) / (longest || 1)}%`;
    const words = `the agent took ${f.seconds(turn.act_seconds || 0)}, the environment ${f.seconds(turn.step_seconds || 0)}`;
    return h("span", { class: "times", title: words, role: "img", "aria-label": words },
      h("span", { class: "act", css: { width: share(turn.act_seconds) } }), h("span", { class: "env", css: { width: share(turn.step_seconds) } }));
  }

  function usage(turn) {
    const u = turn.usage || {};
    if (f.known(u.completion_tokens)) return `${f.count(u.prompt_tokens)} → ${f.plural(u.completion_tokens, "token")}`;
    return turn.tokens && turn.tokens.completion_ids ? f.plural(turn.tokens.completion_ids.length, "token") : null;
  }

  const player = (call) => call.player && h("span", { class: "chip player", title: "the player who acted" }, parts.name(call.player));

  // One turn: `sum` is the reward up to and with it.
  function turnOf(turn, index, sum, context) {
    const info = turn.info && Object.keys(turn.info).length ? parts.fold("Info of the environment", parts.pretty(turn.info)) : null;
    const reward = turn.reward || 0;
    const body = context.tokens ? tokens.view(turn, context.texts, context.told)
      : [(turn.observation || []).map(agentgym.message), turn.reply && agentgym.message(turn.reply)];
    return h("section", { class: "turn", id: `turn-${context.side || ""}${index + 1}`, "aria-label": `Turn ${index + 1}` },
      h("header", { class: "turn-head" }, h("h2", {}, `Turn ${index + 1}`), player(turn),
        h("span", { class: `reward ${reward > 0 ? "up" : reward < 0 ? "down" : ""}`, title: "reward of this turn, and of all so far" }, `reward ${f.number(reward)}`, h("span", { class: "muted" }, ` · so far ${f.number(sum)}`)),
        h("span", { class: "spring" }), usage(turn) && h("span", { class: "muted small" }, usage(turn)),
        h("span", { class: "muted small" }, f.seconds((turn.act_seconds || 0) + (turn.step_seconds || 0))), bar(turn, context.longest)),
      body, info);
  }

  // What the policy asked the model for between two turns: from here it goes on with this in place of the conversation.
  function summaryOf(summary, context) {
    const cut = summary.finish_reason === "length";
    const body = context.tokens ? tokens.view(summary, context.texts, context.told)
      : [parts.fold("The request", () => h("div", {}, (summary.request || []).map(agentgym.message))), summary.reply && agentgym.message(summary.reply)];
    return h("section", { class: "turn summary", "aria-label": "Summary" },
      h("header", { class: "turn-head" }, h("h2", {}, "Summary"), player(summary),
        h("span", { class: "muted" }, cut ? "the context was full, and the summary was cut off" : "the context was full, and the policy went on with this"),
        h("span", { class: "spring" }), usage(summary) && h("span", { class: "muted small" }, usage(summary)), h("span", { class: "muted small" }, f.seconds(summary.act_seconds || 0))), body);
  }

  // All turns and summaries, and what the environment said last.
  function conversation(answer, options = {}) {
    const { episode } = answer;
    const turns = (episode.turns || []).filter((turn) => turn && typeof turn === "object");
    const longest = Math.max(0, ...turns.map((t) => (t.act_seconds || 0) + (t.step_seconds || 0)));
    const context = { longest, texts: answer.tokens, ...options };
    let sum = 0;
    const summaries = (i) => (episode.summaries || []).filter((summary) => summary && summary.turn === i).map((summary) => summaryOf(summary, context));
    const shown = [turns.map((turn, i) => [summaries(i), turnOf(turn, i, (sum += turn.reward || 0), context)]), summaries(turns.length)];
    const last = episode.final_observation || [];
    return [shown, !options.tokens && last.length > 0 && h("section", { class: "turn last" }, h("header", { class: "turn-head" }, h("h2", {}, "After the last turn")), last.map(agentgym.message)),
      !turns.length && parts.empty("No turns.", "The episode failed before the agent said anything.")];
  }

  const answer = (title, text) => text && parts.fact(title, h("bdi", {}, parts.name(text)));

  function facts({ episode, row }) {
    const metrics = Object.entries(episode.metrics || {}).filter(([name]) => name !== "success");
    const calls = (episode.metadata || {}).calls || {};
    const retries = Object.entries(calls.retries || {});
    return h("dl", { class: "facts" },
      parts.fact("Reward", parts.outcomeOf(row) === "error" ? "none: it failed" : f.number(row.reward)),
      Object.entries(episode.rewards || {}).map(([name, value]) => parts.fact(["Reward of ", parts.name(name)], f.number(value))),
      answer("Expected answer", row.expected), answer("Given answer", row.given),
      parts.fact("Ended by", row.end === "context" ? "context: it was full" : parts.name(row.end)), parts.fact("Turns", f.count(row.turns)),
      (episode.summaries || []).length > 0 && parts.fact("Summaries", f.count(episode.summaries.length)),
      f.known(row.tokens) && parts.fact("Tokens", f.count(row.tokens)), parts.fact("Time", f.seconds(row.seconds)),
      f.known(row.cost) && parts.fact("Cost", f.money(row.cost)), f.known(episode.seed) && parts.fact("Seed", episode.seed),
      row.difficulty !== null && row.difficulty !== undefined && parts.fact("Difficulty", parts.name(row.difficulty)),
      f.known(row.step) && parts.fact("Step", f.count(row.step)),
      retries.length > 0 && parts.fact("Retries", retries.map(([cause, n]) => `${cause}: ${n}`).join(", ")),
      metrics.map(([name, value]) => parts.fact(parts.name(name), f.number(value))));
  }

  function names({ row }) {
    return [parts.mark(parts.outcomeOf(row)), h("h1", { class: "name" }, h("bdi", {}, parts.name(row.task)), row.sample ? h("span", { class: "muted" }, ` #${row.sample}`) : null),
      h("span", { class: "muted" }, h("bdi", {}, parts.name(row.cell))), (row.tags || []).map((tag) => h("span", { class: "chip tag" }, parts.name(tag)))];
  }

  const failure = ({ episode, row }) => {
    const text = episode.error || row.error;
    const { traceback } = episode.metadata || {};
    return text && h("div", { class: "note bad", role: "note" }, h("b", {}, "This episode failed: "), parts.longText(text),
      typeof traceback === "string" && traceback && parts.fold("Traceback", parts.longText(traceback, "code")));
  };

  class EpisodeView {
    constructor(view, route) {
      const [, id, , key] = route.path;
      Object.assign(this, { view, id, key, query: route.query, title: "Episode", abort: new AbortController() });
      this.filters = agentgym.filtersOf(route.query);
      this.list = router.link(["run", id, "episodes"], this.filters);
      this.crumbs = [{ name: id, href: router.link(["run", id]) }, { name: "episodes", href: this.list }, { name: "episode" }];
      this.back = this.list;
      fill(view, h("p", { class: "muted" }, "Loading…"));
      this.begin();
    }

    async begin() {
      try {
        this.answer = await api.episode(this.id, this.key, this.abort.signal);
      } catch (error) {
        if (error.name !== "AbortError") fill(this.view, parts.problem(error, () => this.begin()));
        return;
      }
      this.title = this.answer.row.task;
      this.crumbs[2].name = this.answer.row.task;
      this.build();
      agentgym.main.named(this);
      this.neighbours().catch(() => {});
      api.run(this.id, this.abort.signal).then((run) => { this.crumbs[0].name = run.name; agentgym.main.named(this); }, () => {});
    }

    build() {
      const has = tokens.has(this.answer.episode);
      this.before = h("a", { class: "button off", "aria-label": "Previous episode", title: "Previous episode (p)" }, "← Previous");
      this.after = h("a", { class: "button off", "aria-label": "Next episode", title: "Next episode (n)" }, "Next →");
      this.place = h("span", { class: "muted small", role: "status" });
      this.toggle = has && h("button", { type: "button", class: "button", title: "Tokens (t)", on: { click: () => this.tokens() } });
      this.body = h("div", { class: "turns" });
      this.readout = h("div", { class: "token-readout", role: "status", hidden: true });
      fill(this.view, h("div", { class: "bar" }, names(this.answer), h("span", { class: "spring" }), this.toggle, this.place, h("span", { class: "together" }, this.before, this.after)),
        facts(this.answer), failure(this.answer), agentgym.patch.view(this.answer.episode), this.body, this.readout,
        h("div", { class: "folds" }, parts.fold("All of it, as stored", () => parts.longText(JSON.stringify(this.answer.episode, null, 1), "code")), this.metadata()));
      this.draw();
    }

    metadata() {
      const { metadata } = this.answer.episode;
      return metadata && Object.keys(metadata).length > 0 && parts.fold("Metadata", parts.pretty(metadata));
    }

    draw() {
      const on = Boolean(this.toggle) && this.query.view === "tokens";
      if (this.toggle) {
        this.toggle.textContent = on ? "Show messages" : "Show tokens";
        this.toggle.setAttribute("aria-pressed", String(on));
      }
      this.readout.hidden = !on;
      if (on) fill(this.readout, tokens.readout(null));
      fill(this.body, on && h("p", { class: "small" }, tokens.legend(), this.answer.tokens ? null : h("span", { class: "muted" }, " The run has no tokenizer: ids are shown.")),
        conversation(this.answer, { tokens: on, told: (children) => fill(this.readout, children) }));
    }

    tokens() {
      if (!this.toggle) return;
      const query = { ...this.query, view: this.query.view === "tokens" ? "" : "tokens" };
      router.replace(["run", this.id, "episode", this.key], query);
    }

    changed(now) {
      if (!this.answer || now.path[1] !== this.id || now.path[3] !== this.key || now.path[2] !== "episode") return false;
      this.query = now.query;
      this.draw();
      return true;
    }

    // The episodes before and after in the list that the reader came from.
    async neighbours() {
      const at = Number(this.query.at ?? 0);
      const from = Math.max(0, at - AROUND);
      const answer = await api.episodes(this.id, { ...this.filters, offset: from, limit: 2 * AROUND + 1 }, this.abort.signal);
      const found = answer.rows.findIndex((row) => row.key === this.key);
      if (found < 0) return;
      this.place.textContent = `${f.count(from + found + 1)} of ${f.count(answer.matching)}`;
      const view = this.query.view;
      const to = (link, i) => {
        const row = answer.rows[i];
        if (!row) return;
        link.classList.remove("off");
        link.setAttribute("href", router.link(["run", this.id, "episode", row.key], { ...this.filters, at: from + i, view }));
      };
      to(this.before, found - 1);
      to(this.after, found + 1);
    }

    keys(key) {
      const link = { n: this.after, p: this.before }[key];
      if (key === "t") this.tokens();
      else if (link && link.hasAttribute("href")) link.click();
      else return Boolean(link);
      return true;
    }

    // j and k: from turn to turn.
    step(by) {
      const turns = [...this.view.querySelectorAll(".turn")];
      const top = document.querySelector("header.top").getBoundingClientRect().bottom + 12;
      const places = turns.map((turn) => turn.getBoundingClientRect().top - top);
      const next = by > 0 ? places.findIndex((y) => y > 4) : places.findLastIndex((y) => y < -4);
      if (next >= 0) turns[next].scrollIntoView({ block: "start" });
    }

    close() {
      this.abort.abort();
    }
  }

  agentgym.episode = { conversation, facts, failure };
  agentgym.views = { ...agentgym.views, episode: (view, route) => new EpisodeView(view, route) };
})();
