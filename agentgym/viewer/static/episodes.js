// The episodes of a run: filtered and sorted by the server, any number of them.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, written, api, router, parts, VirtualList } = agentgym;
  const f = agentgym.format;
  // Those that are folded away, and all.
  const MORE = ["end", "cause", "reward_min", "reward_max", "turns_min", "turns_max", "tokens_min", "tokens_max", "tag", "finish", "superseded"];
  const NAMES = ["cell", "outcome", "task_has", "text", ...MORE, "sort", "order"];
  const SORTS = [["stored", "as played"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["seconds", "seconds"], ["task", "task"]];
  const ENDS = ["terminated", "truncated", "max_turns", "tokens", "cost", "context", "time", "agent", "error"];
  // Finish reasons of answers that were cut or withheld.
  const CUT = ["length", "content_filter", "context"];
  const places = new Map();

  const filtersOf = (query) => Object.fromEntries(NAMES.filter((name) => query[name]).map((name) => [name, query[name]]));

  // The cells of an evaluation, or the files of a training run.
  const cellNames = (run) => (run.kind === "training" ? (run.steps || []).map((s) => s.cell) : (run.cells || []).map((c) => c.name));

  function choice(name, label, options) {
    return h("label", { class: "field" }, h("span", {}, label), h("select", { name }, options.map(([value, text]) => h("option", { value }, text))));
  }

  function range(name, label, step) {
    const input = (end, words) => h("input", { name: `${name}_${end}`, type: "number", step, placeholder: words, "aria-label": `${label}, ${end === "min" ? "at least" : "at most"}` });
    return h("div", { class: "field" }, h("span", {}, label), h("span", { class: "pair" }, input("min", "from"), input("max", "to")));
  }

  function form(run) {
    const any = (text, values) => [["", text], ...values.map((value) => [value, value])];
    const known = (name) => (run.cells || []).flatMap((cell) => Object.keys((cell.result && cell.result[name]) || {}));
    const [tags, causes, ends, finishes] = [known("by_tag"), known("error_texts"), [...ENDS, ...known("ends")], [...CUT, ...known("finish_reasons")]].map((names) => [...new Set(names)]);
    const more = h("details", { class: "more-filters" }, h("summary", {}, "More filters"), h("div", { class: "fields" },
      choice("end", "Ended by", any("anything", ends)), choice("cause", "Error", any("any", causes)), choice("finish", "Finish reason", any("any", finishes)), range("reward", "Reward", "any"), range("turns", "Turns", "1"), range("tokens", "Tokens", "1"),
      h("label", { class: "field" }, h("span", {}, "Tag"), h("input", { name: "tag", type: "text", list: "tags", autocomplete: "off" }), h("datalist", { id: "tags" }, tags.map((tag) => h("option", { value: tag })))),
      h("label", { class: "field check" }, h("input", { name: "superseded", type: "checkbox", value: "1" }), h("span", {}, "also failed tries that were played again"))));
    return h("form", { class: "filters", role: "search", on: { submit: (event) => event.preventDefault() } },
      h("div", { class: "fields" },
        h("label", { class: "field" }, h("span", {}, "Task"), h("input", { name: "task_has", type: "search", placeholder: "part of its id", autocomplete: "off" })),
        h("label", { class: "field grow" }, h("span", {}, "Text"), h("input", { name: "text", type: "search", placeholder: "in any message", class: "filter", autocomplete: "off" })),
        choice("cell", run.kind === "training" ? "Step" : "Cell", any("all", cellNames(run))),
        choice("outcome", "Outcome", [["", "any"], ["success", "success"], ["failure", "failure"], ["error", "error"]]),
        choice("sort", "Sort by", SORTS),
        choice("order", "Order", [["asc", "ascending"], ["desc", "descending"]])), more);
  }

  function valuesOf(element) {
    const values = {};
    for (const field of element.elements) {
      if (!field.name) continue;
      const value = field.type === "checkbox" ? (field.checked ? "1" : "") : field.value;
      if (value && !(field.name === "sort" && value === "stored") && !(field.name === "order" && value === "asc")) values[field.name] = value;
    }
    return values;
  }

  function show(element, query) {
    for (const field of element.elements) {
      if (!field.name || field === document.activeElement) continue;
      const value = query[field.name] || { sort: "stored", order: "asc" }[field.name] || "";
      if (field.type === "checkbox") field.checked = value === "1";
      else {
        if (field.tagName === "SELECT" && ![...field.options].some((o) => o.value === value)) field.append(h("option", { value }, value));
        field.value = value;
      }
    }
  }

  const cell = (name, ...content) => h("span", { role: "cell", class: `c-${name}` }, content);

  const answer = (name, text) => h("span", { role: "cell", class: `c-${name}`, title: text }, text ? h("bdi", {}, written(text)) : "–");

  // Heads of what can be sorted by do so: `sort(name)`.
  function heads(sort) {
    const sorts = new Set(SORTS.map(([name]) => name));
    const head = (name, title) => h("span", { role: "columnheader", class: `c-${name}`, "data-sort": sorts.has(name) && name },
      sorts.has(name) ? h("button", { class: "sort", type: "button", on: { click: () => sort(name) } }, title) : title);
    return [head("mark", h("span", { class: "hidden" }, "Outcome")), head("task", "Task"), head("cell", "Cell"), head("reward", "Reward"), head("turns", "Turns"), head("tokens", "Tokens"), head("seconds", "Time"), head("expected", "Expected"), head("given", "Given"), head("end", "Ended by")];
  }

  function row(run, query, data, index) {
    const outcome = parts.outcomeOf(data);
    const href = router.link(["run", run, "episode", data.key], { ...filtersOf(query), at: index });
    return [
      cell("mark", parts.mark(outcome)),
      cell("task", h("a", { href, class: "open" }, h("bdi", {}, parts.name(data.task)), data.sample ? h("span", { class: "muted" }, ` #${data.sample}`) : null),
        data.superseded && h("span", { class: "chip" }, "played again"), (data.tags || []).slice(0, 2).map((tag) => h("span", { class: "chip tag" }, parts.name(tag)))),
      cell("cell", h("bdi", {}, parts.name(data.cell))),
      cell("reward", outcome === "error" ? "–" : f.number(data.reward)),
      cell("turns", f.count(data.turns), h("i", {}, " turns")),
      cell("tokens", f.known(data.tokens) ? [f.count(data.tokens), h("i", {}, " tokens")] : h("span", { class: "wide-only" }, "–")),
      cell("seconds", f.seconds(data.seconds)),
      answer("expected", data.expected),
      answer("given", data.given),
      cell("end", data.error ? h("bdi", { class: "bad", title: data.error }, written(data.cause || data.error)) : written(data.end)),
    ];
  }

  class Episodes {
    constructor(view, route) {
      Object.assign(this, { view, id: route.path[1], query: route.query, title: "Episodes", crumbs: [{ name: route.path[1], href: router.link(["run", route.path[1]]) }, { name: "episodes" }] });
      this.abort = new AbortController();
      this.counts = h("span", { class: "muted", role: "status" });
      this.stop = () => {};
      fill(view, h("p", { class: "muted" }, "Loading…"));
      this.begin();
    }

    async begin() {
      try {
        this.run = await api.run(this.id, this.abort.signal);
        this.crumbs[0].name = this.run.name;
        agentgym.main.named(this);
        this.build();
        await this.list.reset(places.get(window.location.hash));
        if (!this.abort.signal.aborted) this.stop = agentgym.live.follow(this.id, () => this.list.refresh());
      } catch (error) {
        if (error.name !== "AbortError") fill(this.view, parts.problem(error, () => this.begin()));
      }
    }

    build() {
      this.form = form(this.run);
      show(this.form, this.query);
      this.form.querySelector("details").open = MORE.some((name) => this.query[name]);
      this.form.addEventListener("change", (event) => event.target.type !== "search" && this.filtered());
      this.typed = parts.settled(300, () => this.filtered(true));
      this.form.addEventListener("input", (event) => event.target.type === "search" && this.typed());
      this.place = h("div", { class: "list-place" });
      const clear = h("a", { class: "plain", href: router.link(["run", this.id, "episodes"]) }, "Clear filters");
      fill(this.view, h("div", { class: "bar" }, h("h1", {}, "Episodes"), this.counts, h("span", { class: "spring" }), clear), this.form, this.place);
      this.list = new VirtualList({
        label: "Episodes", heads: heads((name) => this.sort(name)), height: () => (this.place.clientWidth < 640 ? 56 : 34),
        load: (offset, limit, signal) => api.episodes(this.id, { ...filtersOf(this.query), offset, limit }, signal),
        row: (data, index) => row(this.id, this.query, data, index),
        counted: (answer) => this.counted(answer), failed: (error) => this.failed(error),
      });
      this.element = this.list.element;
      this.element.classList.toggle("one-cell", cellNames(this.run).length < 2);
      fill(this.place, this.element);
      this.sorted();
    }

    // As a click on a head asks: numbers the largest first, then the other way round.
    sort(name) {
      const { sort, order } = this.form.elements;
      order.value = (sort.value === name ? order.value === "asc" : name !== "task") ? "desc" : "asc";
      sort.value = name;
      this.filtered();
    }

    sorted() {
      const { sort, order } = this.form.elements;
      for (const head of this.element.querySelectorAll("[data-sort]")) {
        head.setAttribute("aria-sort", head.dataset.sort !== sort.value ? "none" : order.value === "desc" ? "descending" : "ascending");
      }
    }

    // A change of a filter is a new place; letters typed into the search are one place.
    filtered(typing) {
      (typing ? router.replace : router.go)(["run", this.id, "episodes"], valuesOf(this.form));
    }

    changed(now) {
      if (now.path[1] !== this.id || now.path[2] !== "episodes" || !this.list) return false;
      this.query = now.query;
      show(this.form, now.query);
      this.sorted();
      this.list.reset().catch((error) => error.name !== "AbortError" && this.failed(error));
      return true;
    }

    counted(answer) {
      // The columns of answers are there where any episode that was seen has one.
      for (const name of ["expected", "given"]) if (answer.rows.some((data) => data[name])) this.element.classList.add(`with-${name}`);
      const partly = Math.min(answer.indexing ?? 1, answer.searching ?? 1);
      const found = answer.matching === answer.total ? f.plural(answer.total, "episode") : `${f.count(answer.matching)} of ${f.plural(answer.total, "episode")}`;
      this.counts.textContent = partly < 1 ? `${found} · read ${Math.floor(100 * partly)}%` : found;
      if (!answer.matching && partly >= 1) {
        const hint = answer.total ? parts.empty("No episode matches.", "Change or clear the filters.") : parts.empty("No episodes yet.", "They appear as soon as they end.");
        fill(this.place, hint);
      } else if (!this.element.isConnected) fill(this.place, this.element);
      window.clearTimeout(this.again);
      if (partly < 1) this.again = window.setTimeout(() => this.list.refresh().catch(() => {}), 400);
    }

    failed(error) {
      fill(this.place, parts.problem(error, () => this.list.reset().catch((again) => this.failed(again))));
    }

    filter() {
      this.form.elements.text.focus();
    }

    step(by) {
      this.list.step(by);
    }

    close() {
      this.abort.abort();
      window.clearTimeout(this.again);
      this.stop();
      if (this.list) {
        this.typed.cancel();
        this.list.close();
      }
    }

    // Before the page goes elsewhere: where in the list the reader was.
    leave(hash) {
      if (this.list) places.set(hash, this.list.place());
    }
  }

  agentgym.filtersOf = filtersOf;
  agentgym.views = { ...agentgym.views, episodes: (view, route) => new Episodes(view, route) };
})();
