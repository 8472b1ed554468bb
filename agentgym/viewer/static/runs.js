// The list of runs.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, written } = agentgym;
  const { api, router, parts } = agentgym;
  const f = agentgym.format;
  const EVERY = 3000;
  const READING = 700;

  const columns = (picked, pick) => [
    { name: "pick", title: h("span", { class: "hidden" }, "Compare"), show: (run) => box(run, picked, pick) },
    { name: "name", title: "Run", of: (run) => run.name, show: name },
    { name: "kind", title: "Kind", of: (run) => run.kind, show: (run) => h("span", { class: "chip" }, run.kind), narrow: false },
    { name: "envs", title: "Environments", of: (run) => run.envs.join(" "), show: (run) => several(run.envs), narrow: false },
    { name: "agents", title: "Agents", of: (run) => run.agents.join(" "), show: (run) => several(run.agents), narrow: false },
    { name: "headline", title: "Score", right: true, measure: true, of: (run) => run.headline && run.headline.value, show: headline },
    { name: "episodes", title: "Episodes", right: true, of: (run) => run.episodes, show: (run) => f.count(run.episodes) },
    { name: "errors", title: "Errors", right: true, of: (run) => run.errors, show: (run) => errors(run) },
    { name: "when", title: "When", right: true, of: (run) => run.updated, show: when },
  ];

  const several = (names) => (names.length > 3 ? [written(names.slice(0, 2).join(", ")), h("span", { class: "muted", title: names.join(", ") }, ` and ${names.length - 2} more`)] : written(names.join(", ")));

  const name = (run) => [
    h("a", { class: "open", href: router.link(["run", run.id]) }, written(run.name)),
    run.live && h("span", { class: "live-badge" }, "live"),
    run.problem && h("div", { class: "small bad" }, written(run.problem)),
  ];

  const headline = (run) => (!parts.isRead(run) ? parts.reading(run.indexing) : run.headline
    ? [parts.interval(run.headline.value, run.headline.low, run.headline.high), h("div", { class: "small muted" }, run.headline.label)]
    : h("span", { class: "muted" }, "–"));

  const errors = (run) => (run.errors ? h("span", { class: "bad" }, f.count(run.errors)) : "0");

  const when = (run) => h("time", { title: `began ${f.moment(run.created)}, last written ${f.moment(run.updated)}` }, f.when(run.updated));

  function box(run, picked, pick) {
    const input = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, "data-run": run.id });
    input.checked = picked.includes(run.id);
    input.addEventListener("change", () => pick(run.id, input));
    return input;
  }

  const sought = (run, words) => words.every((word) => `${run.name} ${run.kind} ${run.envs.join(" ")} ${run.agents.join(" ")}`.toLowerCase().includes(word));

  // Which two runs are ticked; the button leads to their comparison.
  function picker(content, button) {
    const picked = [];
    function pick(id, input) {
      if (input.checked) picked.push(id);
      else picked.splice(picked.indexOf(id), 1);
      if (picked.length > 2) {
        const out = picked.shift();
        for (const other of content.querySelectorAll("input[data-run]")) if (other.dataset.run === out) other.checked = false;
      }
      const two = picked.length === 2;
      button.classList.toggle("off", !two);
      button.setAttribute("aria-disabled", String(!two));
      button.textContent = two ? "Compare these two" : picked.length ? "Pick another to compare" : "Compare two runs";
      if (two) button.setAttribute("href", router.link(["compare"], { a: picked[0], b: picked[1] }));
      else button.removeAttribute("href");
    }
    return { picked, pick };
  }

  function open(view, route) {
    let runs = null;
    let before = "";
    let table = null;
    let timer = 0;
    let closed = false;
    const filter = h("input", { type: "search", class: "filter", placeholder: "Filter by name, environment, agent", "aria-label": "Filter runs" });
    filter.value = route.query.filter || "";
    const found = h("span", { class: "muted", role: "status" });
    const button = h("a", { class: "button off", role: "link", "aria-disabled": "true" }, "Compare two runs");
    const content = h("div", {});
    const { picked, pick } = picker(content, button);
    const note = agentgym.embedded && h("p", { class: "muted" }, `Exported ${f.moment(agentgym.embedded.exported)}. `, agentgym.embedded.note);
    fill(view, h("div", { class: "bar" }, h("h1", {}, "Runs"), filter, found, h("span", { class: "spring" }), button), note, content);
    const typed = parts.settled(150, () => router.replace(["runs"], { filter: filter.value }));
    filter.addEventListener("input", () => { show(); typed(); });

    function show() {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = runs.filter((run) => sought(run, words));
      found.textContent = words.length ? `${f.count(rows.length)} of ${f.plural(runs.length, "run")}` : f.plural(runs.length, "run");
      if (!runs.length) {
        table = null;
        fill(content, parts.empty("No runs here yet.", "Evaluate something: `agentgym eval frozen_lake --policy expert -n 20`", "Each run is a folder under `runs/`; this page shows it as soon as it is there."));
        return;
      }
      if (table) return void table.update(rows);
      table = parts.table("Runs", columns(picked, pick), rows);
      fill(content, table.element);
    }

    async function load() {
      window.clearTimeout(timer);
      try {
        runs = (await api.runs()).runs;
        const now = JSON.stringify([runs, Math.floor(Date.now() / 60000)]); // "3 min ago" changes too
        if (!closed && now !== before) show();
        before = now;
      } catch (error) {
        if (!closed && !runs) fill(content, parts.problem(error, load));
      }
      if (!closed && !agentgym.embedded) timer = window.setTimeout(load, document.hidden ? 4 * EVERY : runs && !runs.every(parts.isRead) ? READING : EVERY);
    }
    load();
    return {
      title: "Runs",
      crumbs: [],
      filter: () => filter.focus(),
      close() { closed = true; window.clearTimeout(timer); typed.cancel(); },
      changed: (now) => now.path[0] === "runs" && now.path.length === 1 && (now.query.filter || "") === filter.value,
    };
  }

  agentgym.views = { ...agentgym.views, runs: open };
})();
