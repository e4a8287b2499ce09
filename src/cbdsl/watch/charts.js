"use strict";
// Line charts as SVG elements. Text is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const USUAL_WIDTH = 520, HEIGHT = 210, LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 30;

function element(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round numbers between two bounds, about five of them.
function ticks(low, high) {
  const rough = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((one) => one * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

function powers(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const step = Math.max(1, Math.ceil((last - first) / 5)), found = [];
  for (let one = first; one <= last; one += step) found.push(10 ** one);
  return found;
}

class Chart {
  // series: [{name, style, value: point => number or null}]; options: format, tick (for the axis), log, stacked.
  constructor(figure, title, series, options) {
    this.series = series;
    this.options = options;
    const caption = document.createElement("figcaption");
    this.title = Object.assign(document.createElement("b"), { textContent: title });
    caption.append(this.title);
    this.legend = document.createElement("span");
    this.legend.className = "legend";
    caption.append(this.legend);
    this.svg = element("svg", { role: "img", "aria-label": title });
    figure.replaceChildren(caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.write(); });
  }

  rename(title) {
    this.title.textContent = title;
    this.svg.setAttribute("aria-label", title);
  }

  draw(points, marked) {
    this.points = points;
    this.marked = marked;
    this.used = this.series.filter((one) => points.some((point) => one.value(point) !== null));
    this.svg.replaceChildren();
    this.width = this.svg.clientWidth || USUAL_WIDTH;  // so that text keeps its size on a narrow screen
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    if (!points.length || !this.used.length) {
      this.svg.append(element("text", { x: this.width / 2, y: HEIGHT / 2, class: "empty" }, "nothing to show yet"));
      this.legend.replaceChildren();
      return;
    }
    this.scale();
    this.axes();
    this.options.stacked ? this.areas() : this.lines();
    if (marked) {
      const x = this.x(marked);
      this.svg.append(element("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: "mark" }));
    }
    this.write();
  }

  total(point) {
    return this.used.reduce((sum, one) => sum + (one.value(point) || 0), 0);
  }

  scale() {
    const { points, options } = this;
    const values = options.stacked
      ? points.map((point) => this.total(point))
      : points.flatMap((point) => this.used.map((one) => one.value(point)).filter((one) => one !== null));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (options.log) {
      low = Math.max(1, values.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), Infinity));
      this.marks = powers(Number.isFinite(low) ? low : 1, Math.max(high, 10));
      [low, high] = [this.marks[0], this.marks[this.marks.length - 1]].map(Math.log10);
    } else {
      if (options.stacked) low = 0;
      if (high - low < 1e-9) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
      if (options.stacked) low = 0;
      const room = options.stacked ? 0 : (high - low) * 0.06;
      [low, high] = [low - room, high + (high - low) * 0.06];
      this.marks = ticks(low, high);
    }
    const first = points[0][0], last = Math.max(points[points.length - 1][0], first + 1);
    const measure = options.log ? (value) => Math.log10(Math.max(value, 1)) : (value) => value;
    this.x = (round) => LEFT + ((round - first) / (last - first)) * (this.width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((measure(value) - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
    this.rounds = [first, last];
  }

  axes() {
    for (const mark of this.marks) {
      const y = this.y(mark);
      if (y < TOP - 4 || y > HEIGHT - BOTTOM + 1) continue;
      this.svg.append(element("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "grid" }));
      this.svg.append(element("text", { x: LEFT - 8, y: y + 4, class: "left" }, (this.options.tick || this.options.format)(mark)));
    }
    this.svg.append(element("text", { x: LEFT - 8, y: HEIGHT - 8, class: "left" }, "round"));
    for (const round of ticks(...this.rounds)) {
      if (Number.isInteger(round)) {
        this.svg.append(element("text", { x: this.x(round), y: HEIGHT - 8, class: "below" }, String(round)));
      }
    }
  }

  lines() {
    for (const one of this.used) {
      const shown = this.points.filter((point) => one.value(point) !== null);
      const path = shown.map((point) => `${this.x(point[0]).toFixed(1)},${this.y(one.value(point)).toFixed(1)}`);
      this.svg.append(element("polyline", { points: path.join(" "), class: `curve ${one.style}` }));
      if (shown.length === 1) {
        const [x, y] = path[0].split(",");
        this.svg.append(element("circle", { cx: x, cy: y, r: 3, class: `dot ${one.style}` }));
      }
    }
  }

  areas() {
    const base = this.points.map(() => 0), half = Math.max(0.4, (this.x(this.points[0][0] + 1) - LEFT) / 2);
    for (const one of this.used) {
      const above = this.points.map((point, index) => base[index] + (one.value(point) || 0));
      const at = (values) => this.points.map((point, index) => `${this.x(point[0]).toFixed(1)},${this.y(values[index]).toFixed(1)}`);
      const outline = this.points.length > 1
        ? [...at(above), ...at(base).reverse()]
        : [`${LEFT},${this.y(above[0])}`, `${LEFT + half},${this.y(above[0])}`, `${LEFT + half},${this.y(base[0])}`, `${LEFT},${this.y(base[0])}`];
      this.svg.append(element("polygon", { points: outline.join(" "), class: `area ${one.style}` }));
      above.forEach((value, index) => { base[index] = value; });
    }
  }

  hover(event) {
    if (!this.points || !this.x) return;
    const box = this.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * this.width;
    this.at = this.points.reduce((a, b) => (Math.abs(this.x(b[0]) - x) < Math.abs(this.x(a[0]) - x) ? b : a));
    this.write();
  }

  // The legend, with the values of the round that is pointed at, or of the round that is shown.
  write() {
    if (!this.points || !this.points.length || !this.used) return;
    const chosen = this.at || this.points.find((point) => point[0] === this.marked) || this.points[this.points.length - 1];
    const words = this.used.map((one) => {
      const word = document.createElement("span"), value = one.value(chosen);
      word.className = one.style;
      word.textContent = `${one.name} ${value === null ? "–" : this.options.format(value)}`.trim();
      return word;
    });
    this.legend.replaceChildren(...words, ...(this.at ? [`round ${chosen[0]}`] : []));
  }
}
