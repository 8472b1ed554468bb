// Pieces that several views use: marks, interval bars, tables that sort, folded texts, errors and empty states.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, written } = agentgym;
  const f = agentgym.format;
  const FOLD_LETTERS = 3000;
  const FOLD_LINES = 40;
  const LONGEST_NAME = 300;

  // A share of 0 to 1 with its interval, as a bar and as numbers.
  function interval(value, low, high) {
    if (!f.known(value)) return h("span", { class: "muted" }, "–");
    const share = (x) => `${100 * Math.min(1, Math.max(0, x))}%`;
    const known = f.known(low) && f.known(high);
    const words = known ? `${f.percent(value)}, 95% interval ${f.percent(low)} to ${f.percent(high)}` : f.percent(value);
    return h("span", { class: "interval", title: words },
      h("b", {}, f.percent(value)),
      h("span", { class: "track", "aria-hidden": "true" },
        known && h("span", { class: "band", css: { left: share(low), width: share(high - low) } }),
        h("span", { class: "dot", css: { left: share(value) } })),
      h("span", { class: "range" }, known ? `${f.fixed(100 * low, 1)}–${f.fixed(100 * high, 1)}` : ""));
  }

  const MARKS = { success: ["✓", "success"], failure: ["✗", "failure"], error: ["!", "error"] };

  const outcomeOf = (row) => (row.error || row.end === "error" ? "error" : row.success > 0 ? "success" : "failure");

  function mark(outcome) {
    const [sign, word] = MARKS[outcome];
    return h("span", { class: `mark ${outcome}`, title: word, role: "img", "aria-label": word }, sign);
  }

  // A table whose heads sort. Columns: {name, title, of(row) -> sort value, show(row) -> child, right, narrow, measure: a bar}.
  function table(caption, columns, rows) {
    const state = { by: null, down: false };
    const body = h("tbody");
    const heads = columns.map((column) => head(column, state, () => draw()));
    function draw() {
      const column = columns.find((c) => c.name === state.by);
      const shown = column ? ordered(rows, column.of, state.down) : rows;
      fill(body, shown.map((row) => h("tr", {}, columns.map((c) => h("td", { class: classes(c), "data-name": c.name }, c.show(row))))));
      columns.forEach((c, i) => heads[i].setAttribute("aria-sort", c.name !== state.by ? "none" : state.down ? "descending" : "ascending"));
    }
    draw();
    const element = h("table", { class: "data" }, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, heads)), body);
    return { element: h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, element),
      update: (now) => { rows = now; keepingFocus(element, draw); } };
  }

  // Draw a part of the page again without losing which link or box has the focus.
  function keepingFocus(element, draw) {
    const active = document.activeElement;
    const name = (of) => of.getAttribute("href") || of.getAttribute("aria-label");
    const held = active && element.contains(active) ? name(active) : null;
    draw();
    const again = held && !element.contains(document.activeElement) && [...element.querySelectorAll("a, button, input")].find((one) => name(one) === held);
    if (again) again.focus({ preventScroll: true });
  }

  const classes = (column) => [column.right && "right", column.measure && "measure", column.narrow === false && "wide-only"].filter(Boolean).join(" ");

  function head(column, state, draw) {
    const sort = () => {
      state.down = state.by === column.name ? !state.down : Boolean(column.right);
      state.by = column.name;
      draw();
    };
    const content = column.of ? h("button", { class: "sort", type: "button", on: { click: sort } }, column.title) : column.title;
    return h("th", { scope: "col", class: classes(column), title: column.about }, content);
  }

  // Rows without a value come last, and equal ones stay in their order.
  function ordered(rows, of, down) {
    const absent = (x) => x === null || x === undefined || Number.isNaN(x);
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(String(b), "en", { numeric: true }) : a - b);
    return rows.map((row, i) => ({ row, i, value: of(row) })).sort((one, two) => {
      if (absent(one.value) || absent(two.value)) return Number(absent(one.value)) - Number(absent(two.value)) || one.i - two.i;
      return (down ? -1 : 1) * compare(one.value, two.value) || one.i - two.i;
    }).map((item) => item.row);
  }

  // A text that is folded where it is long. `show` makes its elements: characters as they are, or `markdown.render`.
  function longText(text, className = "text", show = written) {
    const value = String(text);
    const cut = cutAt(value, show !== written);
    const box = h("div", { class: show === written ? className : "rendered", dir: "auto" }, show(value.slice(0, cut)));
    if (cut >= value.length) return box;
    const whole = h("button", { class: "more", type: "button", "aria-expanded": "false" }, `Show all ${f.count(value.length)} characters`);
    let open = false;
    whole.addEventListener("click", () => {
      open = !open;
      fill(box, show(open ? value : value.slice(0, cut)));
      whole.textContent = open ? "Show less" : `Show all ${f.count(value.length)} characters`;
      whole.setAttribute("aria-expanded", String(open));
    });
    return h("div", { class: "folded" }, box, whole);
  }

  // Where a text is folded. An image that is data, in Markdown, is no long text.
  function cutAt(value, markdown) {
    if (markdown && value.includes("](data:image/")) return Math.max(cutAt(value), value.indexOf(")", value.indexOf("](data:image/")) + 1);
    if (value.length <= FOLD_LETTERS && value.split("\n", FOLD_LINES + 1).length <= FOLD_LINES) return value.length;
    let at = -1;
    for (let line = 0; line < FOLD_LINES; line++) {
      at = value.indexOf("\n", at + 1);
      if (at < 0 || at > FOLD_LETTERS) return Math.min(FOLD_LETTERS, value.length);
    }
    return at;
  }

  // What went wrong, in place, and what to do about it.
  function problem(error, again) {
    const status = error && error.status;
    const todo = agentgym.embedded ? "To have more in the file: `agentgym view RUNS --export FILE --episodes N`."
      : status === 404 ? "It may have been moved or deleted; go back to the list of runs."
      : status === 0 ? "Is `agentgym view` still running? Start it again in its terminal; this page goes on by itself."
      : "Look at the terminal of `agentgym view` for more.";
    return h("div", { class: "problem", role: "alert" },
      h("b", {}, written(error && error.message ? error.message : String(error))), h("p", {}, code(todo)),
      again && h("button", { type: "button", on: { click: again } }, "Try again"));
  }

  // Words with `code` in them.
  const code = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

  const empty = (title, ...lines) => h("div", { class: "empty" }, h("b", {}, title), lines.map((line) => h("p", {}, code(line))));

  const fact = (name, value) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value));

  // A function as content is asked for it when the fold is opened first.
  function fold(title, ...content) {
    const [make] = content;
    if (typeof make !== "function") return h("details", { class: "fold" }, h("summary", {}, title), content);
    const element = h("details", { class: "fold" }, h("summary", {}, title));
    element.addEventListener("toggle", () => element.append(make()), { once: true });
    return element;
  }

  // Instead of a score, which would be of a part of the episodes.
  const reading = (share) => h("span", { class: "reading" }, `reading ${Math.floor(100 * share)}%`);
  const isRead = (run) => !(f.known(run.indexing) && run.indexing < 1);

  const pretty = (value) => longText(typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? String(value), "code");

  // A name, which may be as long as a model or a task likes.
  function name(text) {
    const value = String(text);
    return written(value.length > LONGEST_NAME ? `${value.slice(0, LONGEST_NAME)}…` : value);
  }

  // Call it often; it runs once things have been quiet for a moment, unless cancelled.
  function settled(milliseconds, run) {
    let timer = 0;
    const call = (...values) => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => run(...values), milliseconds);
    };
    call.cancel = () => window.clearTimeout(timer);
    return call;
  }

  // Run again and again, but never two at a time, and at most once in a while: for what events ask for.
  function paced(milliseconds, run) {
    let busy = false;
    let wanted = false;
    async function next() {
      if (busy) return;
      busy = true;
      while (wanted) {
        wanted = false;
        try {
          await run();
        } catch (error) {
          if (error.name !== "AbortError" && !(error instanceof agentgym.api.ApiError)) console.error(error);
        }
        await new Promise((done) => window.setTimeout(done, milliseconds));
      }
      busy = false;
    }
    return () => { wanted = true; next(); };
  }

  agentgym.parts = { interval, mark, outcomeOf, table, ordered, keepingFocus, longText, problem, code, empty, fact, fold, reading, isRead, pretty, name, settled, paced };
})();
