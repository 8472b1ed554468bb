// An evaluation: its cells with intervals, and of one of them tags, difficulty, rewards and errors.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, svg, fill, router, parts } = agentgym;
  const f = agentgym.format;

  // What is known of each cell: `result` is the one that is written where it is of these episodes, else what the server
  // makes of those so far, which knows less of the endpoints.
  function cellsOf(run) {
    const results = new Map(((run.results && run.results.cells) || []).map((cell) => [cell.name, cell]));
    return (run.cells || []).map((cell) => {
      const result = results.get(cell.name);
      const whole = result && result.episodes + result.errors === cell.episodes && result.errors === cell.errors;
      const now = (whole ? result : cell.result) || {};
      return { ...cell, success_low: cell.low, success_high: cell.high, reward_low: now.reward_low, reward_high: now.reward_high, result: (whole ? result : cell.result) || null };
    });
  }

  const sumOf = (counts) => Object.values(counts || {}).reduce((a, b) => a + b, 0);

  function share(passes) {
    const known = Object.entries(passes || {}).filter(([k]) => Number(k) > 1);
    if (!known.length) return h("span", { class: "muted" }, "–");
    return h("span", { class: "passes" }, known.map(([k, value]) => h("span", {}, h("i", {}, k), ` ${f.percent(value)}`)));
  }

  function tokens(cell) {
    const per = cell.result && cell.result.tokens_per_episode;
    if (!per || !f.known(per.completion_tokens)) return h("span", { class: "muted" }, "–");
    const words = `${f.known(per.prompt_tokens) ? `${f.count(per.prompt_tokens)} read and ` : ""}${f.count(per.completion_tokens)} written, mean of an episode`;
    return h("span", { title: words }, f.short(per.completion_tokens), f.known(per.prompt_tokens) ? h("span", { class: "muted" }, ` / ${f.short(per.prompt_tokens)}`) : null);
  }

  function meanReward(cell) {
    const half = f.known(cell.reward_low) && f.known(cell.reward_high) ? (cell.reward_high - cell.reward_low) / 2 : null;
    return [f.fixed(cell.reward, 3), half ? h("span", { class: "muted" }, ` ±${half.toFixed(3)}`) : null];
  }

  const last = (passes) => Object.values(passes || {}).at(-1);

  function columns(run, cells) {
    const to = (cell, more) => router.link(["run", run.id, "episodes"], { cell: cell.name, ...more });
    const one = (name, title, of, show, more) => ({ name, title, of, show, right: true, ...more });
    const any = (test) => cells.some((cell) => cell.result && test(cell.result));
    return [
      { name: "env", title: "Environment", of: (c) => c.env, show: (c) => [h("a", { class: "open", href: to(c) }, parts.name(c.env)), c.split && c.split !== "test" && h("span", { class: "chip" }, c.split)] },
      { name: "agent", title: "Agent", of: (c) => c.agent, show: (c) => parts.name(c.agent) },
      one("success", "Success", (c) => c.success, (c) => (f.known(c.success) || parts.isRead(run) ? parts.interval(c.success, c.success_low, c.success_high) : parts.reading(run.indexing)), { measure: true, about: "share of successful episodes, 95% interval clustered by task" }),
      one("reward", "Reward", (c) => c.reward, meanReward, { about: "mean of an episode, with half of its 95% interval" }),
      any((r) => last(r.pass_at) !== undefined && r.samples > 1) && one("pass", "pass@k", (c) => c.result && last(c.result.pass_at), (c) => share(c.result && c.result.pass_at), { about: "chance that one of k samples succeeds" }),
      any((r) => last(r.pass_hat) !== undefined && r.samples > 1) && one("hat", "pass^k", (c) => c.result && last(c.result.pass_hat), (c) => share(c.result && c.result.pass_hat), { about: "chance that all of k samples succeed" }),
      one("episodes", "Episodes", (c) => c.episodes, (c) => [f.count(c.episodes), f.known(c.planned) && c.planned > c.episodes && h("span", { class: "muted" }, ` of ${f.count(c.planned)}`)]),
      one("errors", "Errors", (c) => c.errors, (c) => (c.errors ? h("a", { class: "bad", href: to(c, { outcome: "error" }) }, f.count(c.errors)) : "0")),
      any((r) => r.cut) && one("cut", "Cut", (c) => c.result && c.result.cut, (c) => f.count(c.result && c.result.cut), { about: "episodes with an answer that was cut, withheld or never asked for" }),
      any((r) => f.known(r.success_with_errors)) && one("zeros", "Errors as zeros", (c) => c.result && c.result.success_with_errors, zeros, { about: "success and reward with each error as no success and the least reward" }),
      one("turns", "Turns", (c) => c.turns, (c) => f.fixed(c.turns, 1)),
      any((r) => r.tokens_per_episode && r.tokens_per_episode.completion_tokens) && one("tokens", "Tokens", (c) => c.result && c.result.tokens_per_episode.completion_tokens, tokens, { about: "mean of an episode: written / read" }),
      any((r) => f.known(r.cost)) && one("cost", "Cost", (c) => c.result && c.result.cost, (c) => f.money(c.result && c.result.cost)),
      any((r) => sumOf(r.retries)) && one("retries", "Retries", (c) => c.result && sumOf(c.result.retries), (c) => retries(c.result)),
    ].filter(Boolean);
  }

  const zeros = ({ result: r }) => (r && f.known(r.success_with_errors) ? [f.percent(r.success_with_errors), h("span", { class: "muted" }, ` · ${f.fixed(r.reward_with_errors, 3)}`)] : "–");

  const retries = (result) => (result ? h("span", { title: Object.entries(result.retries).map(([cause, n]) => `${cause}: ${n}`).join(", ") }, f.count(sumOf(result.retries))) : "–");

  function breakdown(title, of, link) {
    const rows = Object.entries(of || {}).map(([name, part], i) => ({ name, i, ...part }));
    if (!rows.length) return null;
    const table = parts.table(title, [
      { name: "name", title, of: (r) => r.i, show: (r) => (link ? h("a", { class: "open", href: link(r.name) }, parts.name(r.name)) : parts.name(r.name)) },
      { name: "success", title: "Success", right: true, measure: true, of: (r) => r.success, show: (r) => parts.interval(r.success, r.success_low, r.success_high) },
      { name: "reward", title: "Reward", right: true, of: (r) => r.reward, show: (r) => f.fixed(r.reward, 3), narrow: false },
      { name: "episodes", title: "Episodes", right: true, of: (r) => r.episodes, show: (r) => f.count(r.episodes) },
      { name: "errors", title: "Errors", right: true, of: (r) => r.errors, show: (r) => f.count(r.errors), narrow: false },
    ], rows);
    return h("section", { class: "card" }, h("h3", {}, title), table.element);
  }

  // Counts by name, the most frequent first, linked to their episodes. With a total, each is also a share.
  function counts(title, of, link, { bad = false, total = 0 } = {}) {
    const rows = Object.entries(of || {}).sort((a, b) => b[1] - a[1]);
    if (!rows.length) return null;
    return h("section", { class: "card" }, h("h3", {}, title), h("ul", { class: "causes" }, rows.map(([text, n]) =>
      h("li", {}, h("b", { class: bad ? "bad" : "" }, f.count(n)), link ? h("a", { class: bad ? "open" : "", href: link(text) }, parts.name(text)) : h("span", {}, parts.name(text)),
        total > 0 && h("span", { class: "muted" }, f.percent(n / total))))));
  }

  function byPlayer(rewards) {
    const rows = Object.entries(rewards || {});
    return rows.length > 0 && h("section", { class: "card" }, h("h3", {}, "Mean reward by player"), h("dl", { class: "facts" }, rows.map(([name, value]) => parts.fact(parts.name(name), f.fixed(value, 3)))));
  }

  function histogram(rewards) {
    if (!rewards || rewards.counts.length < 2) return null;
    const most = Math.max(...rewards.counts);
    const [wide, tall] = [360, 96];
    const step = wide / rewards.counts.length;
    const bars = rewards.counts.map((n, i) => svg("rect", { x: i * step + 1, width: Math.max(1, step - 2), y: tall - (tall * n) / most, height: (tall * n) / most },
      svg("title", {}, `${f.plural(n, "episode")} with a reward of about ${f.number(rewards.low + ((i + 0.5) * (rewards.high - rewards.low)) / rewards.counts.length)}`)));
    return h("section", { class: "card" }, h("h3", {}, "Rewards"),
      svg("svg", { class: "bars", viewBox: `0 0 ${wide} ${tall}`, preserveAspectRatio: "none", role: "img", "aria-label": "How many episodes had which reward" }, bars),
      h("div", { class: "ends small muted" }, h("span", {}, f.number(rewards.low)), h("span", {}, f.number(rewards.high))));
  }

  function details(run, cell) {
    if (!parts.isRead(run)) return parts.empty("The episodes are still being read.", "Rewards, tags, difficulty and causes of errors come when all are.");
    if (!cell || !cell.result) return parts.empty("No episodes yet.", "Rewards, tags, difficulty and causes of errors come with them.");
    const to = (more) => router.link(["run", run.id, "episodes"], { cell: cell.name, ...more });
    const r = cell.result;
    return h("div", { class: "cards" },
      breakdown("Difficulty", r.by_difficulty), breakdown("Tag", r.by_tag, (tag) => to({ tag })),
      histogram(r.rewards), byPlayer(r.players), counts("How episodes ended", r.ends, (end) => to({ end }), { total: sumOf(r.ends) }),
      counts("Finish reasons of answers", r.finish_reasons, (finish) => to({ finish })),
      counts("Agent failures by cause", r.agent_failures), counts("Requests sent again, by cause", r.retries),
      counts("Errors by cause", r.error_texts, (text) => to({ outcome: "error", cause: text }), { bad: true }));
  }

  function open(holder, first) {
    let run = first;
    let cells = cellsOf(run);
    let chosen = cells[0] && cells[0].name;
    const picker = h("select", { "aria-label": "Details of" });
    const below = h("div", {});
    let width = 0;
    let read = false;
    let table = null;
    const top = h("div", {});
    picker.addEventListener("change", () => { chosen = picker.value; draw(); });

    function draw() {
      const now = columns(run, cells);
      if (!cells.length) fill(top, parts.empty("No cells yet.", "The run has just begun; what it plays appears here."));
      else if (table && read && width === now.length) table.update(cells);
      else {
        table = parts.table("Results of each cell", now, cells);
        width = now.length;
        read = parts.isRead(run); // while it is not, how much of it is
        parts.keepingFocus(top, () => fill(top, table.element));
      }
      if (picker.options.length !== cells.length) fill(picker, cells.map((cell) => h("option", { value: cell.name }, cell.name)));
      picker.value = chosen;
      parts.keepingFocus(below, () => fill(below, details(run, cells.find((cell) => cell.name === chosen))));
    }
    fill(holder, top, h("div", { class: "bar sub" }, h("h2", {}, "Details of"), picker), below);
    draw();
    return { update(now) { run = now; cells = cellsOf(run); chosen = chosen || (cells[0] && cells[0].name); draw(); } };
  }

  agentgym.kinds.evaluation = open;
})();
