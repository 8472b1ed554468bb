// Line charts with bands, as SVG of the size at hand. The pointer or the arrow keys read values off.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, svg, fill } = agentgym;
  const f = agentgym.format;
  const HEIGHT = 200;
  const EDGE = { left: 52, right: 12, top: 8, bottom: 24 };

  function ticks(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step + 0);
    return out;
  }

  function ranges(series, percent) {
    const xs = [];
    const ys = [];
    for (const { points } of series) {
      for (const [x, y, low, high] of points) {
        xs.push(x);
        ys.push(...[y, low, high].filter(f.known));
      }
    }
    if (!xs.length) return null;
    const [x0, x1] = extent(xs);
    let [y0, y1] = extent(ys);
    if (percent) [y0, y1] = [Math.min(0, y0), Math.max(1, y1)];
    const spare = y1 > y0 ? (y1 - y0) * 0.06 : Math.abs(y0) * 0.1 || 1;
    return { x: x1 > x0 ? [x0, x1] : [x0 - 0.5, x1 + 0.5], y: percent ? [y0, y1] : [y0 - spare, y1 + spare] };
  }

  const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

  // {title, percent, format, xName}; update(series) with series [{name, colour: 0.., points: [[x, y, low, high]]}].
  class Chart {
    constructor(options) {
      Object.assign(this, { format: options.percent ? f.percent : f.number, xName: "step" }, options);
      this.series = [];
      this.at = null;
      this.readout = h("div", { class: "readout", "aria-live": "polite" });
      this.holder = h("div", { class: "plot", tabindex: "0", role: "img", on: {
        pointermove: (event) => this.point(event), pointerleave: () => this.read(null), blur: () => this.read(null),
        keydown: (event) => this.key(event) } });
      this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, this.title), options.tools), this.readout, this.holder);
      this.seen = new ResizeObserver(() => this.draw());
      this.seen.observe(this.holder);
    }

    close() {
      this.seen.disconnect();
    }

    update(series) {
      this.series = series;
      this.xs = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
      this.holder.setAttribute("aria-label", `${this.title}: ${series.map((s) => this.words(s)).join("; ")}. Arrow keys read values.`);
      this.draw();
    }

    words(series) {
      const last = series.points[series.points.length - 1];
      return last ? `${series.name} ends at ${this.format(last[1])}` : `${series.name} has no values`;
    }

    draw() {
      const width = Math.max(220, Math.floor(this.holder.clientWidth || 420));
      const range = ranges(this.series, this.percent);
      if (!range) {
        fill(this.holder, h("p", { class: "muted" }, "No values yet."));
        return;
      }
      const { left, right, top, bottom } = EDGE;
      const wide = width - left - right;
      const tall = HEIGHT - top - bottom;
      this.x = (value) => left + (wide * (value - range.x[0])) / (range.x[1] - range.x[0]);
      this.y = (value) => top + tall * (1 - (value - range.y[0]) / (range.y[1] - range.y[0]));
      this.cursor = svg("g", { class: "cursor" });
      fill(this.holder, svg("svg", { width, height: HEIGHT, "aria-hidden": "true" },
        this.grid(range, width), this.series.map((s) => this.line(s)), this.cursor));
      this.read(this.at);
    }

    grid(range, width) {
      const across = ticks(...range.y, 4).map((v) => [
        svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(v), y2: this.y(v) }),
        svg("text", { class: "tick", x: EDGE.left - 6, y: this.y(v) + 4, "text-anchor": "end" }, this.percent ? `${Math.round(100 * v)}%` : f.number(Number(v.toPrecision(6)))),
      ]);
      const whole = this.xName === "step";
      const down = ticks(...range.x, Math.max(2, Math.floor(width / 90))).filter((v) => !whole || Number.isInteger(v)).map((v) =>
        svg("text", { class: "tick", x: this.x(v), y: HEIGHT - 6, "text-anchor": "middle" }, whole ? f.count(v) : f.seconds(v)));
      return [across, down];
    }

    line(series) {
      const colour = `line c${series.colour % 6}`;
      const points = series.points.filter((p) => f.known(p[1]));
      const at = (x, y) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`;
      const banded = points.filter((p) => f.known(p[2]) && f.known(p[3]));
      const outline = [...banded.map((p) => at(p[0], p[3])), ...banded.slice().reverse().map((p) => at(p[0], p[2]))];
      return svg("g", { class: colour },
        banded.length > 1 && svg("polygon", { class: "area", points: outline.join(" ") }),
        banded.length === 1 && svg("line", { class: "whisker", x1: this.x(banded[0][0]), x2: this.x(banded[0][0]), y1: this.y(banded[0][2]), y2: this.y(banded[0][3]) }),
        points.length > 1 && svg("polyline", { class: "path", points: points.map((p) => at(p[0], p[1])).join(" ") }),
        points.length <= 40 && points.map((p) => svg("circle", { class: "point", cx: this.x(p[0]), cy: this.y(p[1]), r: 2.5 })));
    }

    point(event) {
      if (!this.x) return;
      const x = event.clientX - this.holder.getBoundingClientRect().left;
      this.read(nearest(this.xs, (value) => Math.abs(this.x(value) - x)));
    }

    key(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.xs.length) return;
      event.preventDefault();
      event.stopPropagation();
      const now = this.at === null ? (by > 0 ? -1 : this.xs.length) : this.xs.indexOf(this.at);
      this.read(this.xs[Math.max(0, Math.min(this.xs.length - 1, now + by))]);
    }

    // Show the values at one x; null shows the last ones.
    read(x) {
      this.at = x;
      const many = this.series.length > 1;
      const values = this.series.map((s) => [s, x === null ? s.points[s.points.length - 1] : s.points.find((p) => p[0] === x)]);
      const found = values.filter(([, p]) => p);
      const label = found.length && (x === null ? "last" : this.xName === "step" ? `step ${f.count(x)}` : f.seconds(x));
      fill(this.readout, label && h("span", { class: "muted" }, label), found.map(([s, p]) => h("span", { class: `c${s.colour % 6}` },
        h("i", { class: "swatch" }), many && `${s.name} `, h("b", {}, this.format(p[1])),
        f.known(p[2]) && f.known(p[3]) && h("span", { class: "muted" }, ` ${this.format(p[2])} – ${this.format(p[3])}`))));
      if (!this.cursor) return;
      fill(this.cursor, x !== null && svg("line", { x1: this.x(x), x2: this.x(x), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
        x !== null && found.map(([s, p]) => f.known(p[1]) && svg("circle", { class: `c${s.colour % 6}`, cx: this.x(x), cy: this.y(p[1]), r: 4 })));
    }
  }

  function nearest(values, distance) {
    let best = null;
    for (const value of values) if (best === null || distance(value) < distance(best)) best = value;
    return best;
  }

  agentgym.Chart = Chart;
})();
