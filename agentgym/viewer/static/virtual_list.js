// A list of any length: only the rows in sight are elements, and their data is asked for a page at a time.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h } = agentgym;
  const PAGE = 200;
  const SPARE = 8;

  // options: {label, heads, load(offset, limit) -> {matching, rows}, row(data, index) -> children,
  // height() -> pixels of a row, counted(answer), failed(error)}
  class VirtualList {
    constructor(options) {
      Object.assign(this, options);
      this.pages = new Map();
      this.asked = new Map();
      this.shown = new Map();
      this.total = 0;
      this.at = -1;
      this.generation = 0;
      this.space = h("div", { class: "vspace", role: "rowgroup" });
      this.scroller = h("div", { class: "vscroll" }, this.space);
      this.element = h("div", { class: "vlist", role: "table", "aria-label": this.label },
        h("div", { role: "rowgroup", class: "vtop" }, h("div", { class: "vrow vhead", role: "row" }, this.heads)), this.scroller);
      this.draw = this.draw.bind(this);
      this.scroller.addEventListener("scroll", () => window.requestAnimationFrame(this.draw), { passive: true });
      this.resized = new ResizeObserver(() => this.reflow());
      this.resized.observe(this.scroller);
      this.scroller.addEventListener("focusin", (event) => this.focused(event));
    }

    close() {
      this.resized.disconnect();
      this.generation++;
      if (this.abort) this.abort.abort();
    }

    // Start anew, as after another filter; `place` = {top, at} where to be.
    async reset(place) {
      this.generation++;
      if (this.abort) this.abort.abort();
      this.abort = new AbortController();
      this.pages.clear();
      this.asked.clear();
      this.at = place ? place.at : -1;
      const first = place ? Math.max(0, Math.floor(place.top / this.height() / PAGE)) : 0;
      await this.fetch(first);
      this.clear();
      this.draw();
      this.scroller.scrollTop = place ? place.top : 0;
      this.draw();
    }

    // The same list with new data: what is in sight stays in sight.
    async refresh() {
      const generation = ++this.generation;
      this.asked.clear();
      const [from, to] = this.sight();
      const pages = new Map();
      for (let page = Math.floor(from / PAGE); page <= Math.floor(Math.max(from, to - 1) / PAGE); page++) {
        const answer = await this.load(page * PAGE, PAGE, this.abort && this.abort.signal);
        if (generation !== this.generation) return;
        pages.set(page, answer.rows);
        this.take(answer);
      }
      this.pages = pages;
      this.asked.clear(); // what was asked meanwhile went into the pages of before
      this.clear(true);
      this.draw();
    }

    take(answer) {
      this.total = answer.matching;
      this.space.style.height = `${this.total * this.height()}px`;
      this.element.setAttribute("aria-rowcount", String(this.total + 1));
      if (this.counted) this.counted(answer);
    }

    fetch(page) {
      if (this.asked.has(page)) return this.asked.get(page);
      const generation = this.generation;
      const asked = this.load(page * PAGE, PAGE, this.abort && this.abort.signal).then((answer) => {
        if (generation !== this.generation) return;
        this.pages.set(page, answer.rows);
        this.take(answer);
      });
      this.asked.set(page, asked);
      asked.catch(() => this.asked.delete(page));
      return asked;
    }

    sight() {
      const height = this.height();
      const from = Math.max(0, Math.floor(this.scroller.scrollTop / height) - SPARE);
      const to = Math.min(this.total, Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / height) + SPARE);
      return [Math.min(from, to), to];
    }

    data(index) {
      const page = this.pages.get(Math.floor(index / PAGE));
      return page && page[index % PAGE];
    }

    draw() {
      const [from, to] = this.sight();
      for (const [index, element] of this.shown) {
        if ((index < from || index >= to) && !element.contains(document.activeElement)) {
          element.remove();
          this.shown.delete(index);
        }
      }
      for (let index = from; index < to; index++) {
        const old = this.shown.get(index);
        const data = this.data(index);
        if (old && !(old.waiting && data)) continue;
        if (old) old.remove();
        const element = this.make(index, data);
        this.shown.set(index, element);
        this.space.append(element);
      }
      for (let page = Math.floor(from / PAGE); to > from && page <= Math.floor((to - 1) / PAGE); page++) {
        if (!this.pages.has(page)) this.later(page);
      }
      this.marked();
    }

    // Ask for a page that stays in sight for a moment, so that a long scroll does not ask for all it passes.
    later(page) {
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => {
        const [from, to] = this.sight();
        for (let p = Math.floor(from / PAGE); p <= Math.floor((to - 1) / PAGE); p++) {
          if (!this.pages.has(p)) this.fetch(p).then(this.draw, (error) => this.failed && error.name !== "AbortError" && this.failed(error));
        }
      }, 40);
    }

    make(index, data) {
      const children = data ? this.row(data, index) : h("span", { role: "cell", class: "muted waiting" }, "…");
      const element = h("div", { class: "vrow", role: "row", "aria-rowindex": index + 2,
        css: { transform: `translateY(${index * this.height()}px)` } }, children);
      element.waiting = !data;
      return element;
    }

    clear(keepFocus) {
      const held = keepFocus && this.scroller.contains(document.activeElement) ? this.at : -1;
      for (const element of this.shown.values()) element.remove();
      this.shown.clear();
      if (held >= 0) window.requestAnimationFrame(() => this.go(held, true));
    }

    reflow() {
      const height = this.height();
      if (this.drawnHeight !== height) {
        this.drawnHeight = height;
        this.space.style.height = `${this.total * height}px`;
        this.clear();
      }
      this.draw();
    }

    marked() {
      for (const [index, element] of this.shown) element.classList.toggle("at", index === this.at);
    }

    focused(event) {
      for (const [index, element] of this.shown) if (element.contains(event.target)) this.at = index;
      this.marked();
    }

    // Go to a row, as a key does; it is scrolled to and has the focus.
    async go(index, still) {
      if (!this.total) return;
      this.at = Math.max(0, Math.min(this.total - 1, index));
      const height = this.height();
      const top = this.at * height;
      const below = top + height - this.scroller.clientHeight;
      if (!still && top < this.scroller.scrollTop) this.scroller.scrollTop = top;
      if (!still && below > this.scroller.scrollTop) this.scroller.scrollTop = below;
      if (!this.data(this.at)) await this.fetch(Math.floor(this.at / PAGE)).catch(() => {});
      this.draw();
      const element = this.shown.get(this.at);
      const link = element && element.querySelector("a");
      if (link) link.focus({ preventScroll: true });
    }

    step(by) {
      const [from] = this.sight();
      return this.go(this.at < 0 ? (by > 0 ? from && from + SPARE : this.total - 1) : this.at + by);
    }

    place() {
      return { top: this.scroller.scrollTop, at: this.at };
    }
  }

  agentgym.VirtualList = VirtualList;
})();
