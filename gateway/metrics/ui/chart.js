/** A chart of the last 15 minutes: lines, or areas on top of each other. */
import { colour, element, fitted, setText } from "./dom.js";
import { HISTORY_S } from "./feed.js";

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {string} colour a name of the style sheet
 * @property {(point: import("./feed.js").Point) => number|null} read null: there is no value
 */

const STEPS = [1, 2, 2.5, 5, 10];
const LEFT = 68,
  BOTTOM = 16,
  TOP = 4; // pixels
const GAP_S = 15; // a line is broken where readings are further apart

export class Chart {
  /**
   * @param {HTMLElement} host gets a figure
   * @param {string} title
   * @param {Series[]} series
   * @param {(value: number) => string} format
   * @param {{isStacked?: boolean, base?: number}} [options] base: of the units, 1000 or 1024
   */
  constructor(host, title, series, format, { isStacked = false, base = 1000 } = {}) {
    Object.assign(this, { title, series, format, isStacked, base });
    /** @type {import("./feed.js").Point[]} */
    this.points = [];
    this.back = null; // seconds before now that the pointer or the arrow keys point at
    this.cells = series.map(() => element("span"));
    this.when = element("small");
    const keys = series.map((each, index) =>
      element(
        "span",
        { class: "key" },
        element("span", { class: `swatch ${each.colour}` }),
        each.name,
        this.cells[index],
      ),
    );
    this.canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { tabindex: "0", role: "img" }));
    host.append(
      element(
        "figure",
        {},
        element("figcaption", {}, element("strong", {}, title), this.when, ...keys),
        this.canvas,
      ),
    );
    this.listen();
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) => {
      const width = this.canvas.clientWidth - LEFT;
      this.point(HISTORY_S * (1 - (event.offsetX - LEFT) / width));
    });
    for (const name of ["pointerleave", "blur"]) this.canvas.addEventListener(name, () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 10, ArrowRight: -10 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.point((this.back ?? 0) + step);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen) this.draw();
    }).observe(this.canvas);
  }

  /** @param {number|null} back seconds before now; null: now */
  point(back) {
    this.back = back === null ? null : Math.min(HISTORY_S, Math.max(0, back));
    this.draw();
  }

  /** @param {import("./feed.js").Point[]} points */
  update(points) {
    this.points = points;
    this.draw();
  }

  /** Draw it if it is seen. */
  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !this.isSeen) return;
    const context = fitted(this.canvas, width, height);
    const rows = this.points.map((point) => this.series.map((each) => each.read(point)));
    const top = niceAbove(this.highest(rows), this.base);
    const now = this.points.at(-1)?.time_s ?? 0;
    const x = (/** @type {number} */ time) => LEFT + (width - LEFT) * (1 - (now - time) / HISTORY_S);
    const y = (/** @type {number} */ value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
    this.drawGrid(context, width, top, y);
    this.series.forEach((each, index) => this.drawSeries(context, colour(each.colour), index, rows, x, y));
    this.tell(rows, now, context, x, height);
  }

  /** @param {(number|null)[][]} rows */
  highest(rows) {
    const tops = rows.map((row) =>
      this.isStacked
        ? row.reduce((sum, value) => sum + (value ?? 0), 0)
        : Math.max(...row.map((value) => value ?? 0)),
    );
    return tops.reduce((most, value) => Math.max(most, value), 0);
  }

  drawGrid(context, width, top, y) {
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of [0, top / 2, top]) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width, at);
      context.stroke();
      context.fillText(this.format(value), LEFT - 5, Math.max(7, at));
    }
    context.textBaseline = "bottom";
    for (const minutes of [15, 10, 5]) {
      context.textAlign = minutes === 15 ? "left" : "center";
      context.fillText(`-${minutes} min`, LEFT + (width - LEFT) * (1 - minutes / 15), y(0) + BOTTOM);
    }
    context.textAlign = "right";
    context.fillText("now", width, y(0) + BOTTOM);
  }

  drawSeries(context, ink, index, rows, x, y) {
    const below = (row) =>
      this.isStacked ? row.slice(0, index).reduce((sum, value) => sum + (value ?? 0), 0) : 0;
    context.strokeStyle = context.fillStyle = ink;
    context.lineWidth = 1.5;
    let run = [];
    const finish = () => {
      if (this.isStacked && run.length) fill(context, run);
      else if (run.length) stroke(context, run);
      run = [];
    };
    rows.forEach((row, position) => {
      const time = this.points[position].time_s;
      const isGap = position > 0 && time - this.points[position - 1].time_s > GAP_S;
      if (isGap || row[index] === null) finish();
      if (row[index] === null) return;
      const base = below(row);
      run.push([x(time), y(base + row[index]), y(base)]);
    });
    finish();
  }

  tell(rows, now, context, x, height) {
    const target = now - (this.back ?? 0);
    let position = rows.length - 1;
    while (position > 0 && this.points[position].time_s > target) position -= 1;
    const row = rows[position] ?? [];
    this.cells.forEach((cell, index) =>
      setText(cell, row[index] === null || row[index] === undefined ? "-" : this.format(row[index])),
    );
    setText(this.when, this.back === null ? "" : `${Math.round(this.back)} s ago`);
    const said = this.series.map((each, index) => `${each.name} ${this.cells[index].textContent}`);
    this.canvas.setAttribute(
      "aria-label",
      `${this.title}, ${this.when.textContent || "now"}: ${said.join(", ")}`,
    );
    if (this.back === null) return;
    context.strokeStyle = colour("soft");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(target), TOP);
    context.lineTo(x(target), height - BOTTOM);
    context.stroke();
  }
}

/**
 * Return the least round number that is not below the value.
 * @param {number} value
 * @param {number} base of the units: 1000 or 1024
 */
export function niceAbove(value, base) {
  if (value <= 0) return 1;
  const unit = value < 1 ? 1 : base ** Math.floor(Math.log(value) / Math.log(base));
  const power = 10 ** Math.floor(Math.log10(value / unit));
  return (STEPS.find((step) => step * power * unit >= value) ?? 10) * power * unit;
}

function stroke(context, run) {
  context.beginPath();
  run.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  if (run.length === 1) context.lineTo(run[0][0] + 1, run[0][1]);
  context.stroke();
}

function fill(context, run) {
  context.beginPath();
  run.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  for (const [x, , base] of [...run].reverse()) context.lineTo(x, base);
  context.closePath();
  context.fill();
}
