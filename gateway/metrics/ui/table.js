/**
 * A table that keeps no more rows in the document than are seen, so that a thousand workers scroll as ten do.
 * All rows are equally high. Rows outside the view are two empty rows, above and below, of their height.
 */
import { element, setText } from "./dom.js";
import { compare } from "./format.js";

/**
 * @typedef {object} Column
 * @property {string} name
 * @property {(row: any) => string} [text]
 * @property {(cell: HTMLElement, row: any) => void} [draw] instead of text
 * @property {(row: any) => number|string} [order] what to sort by; a column without is not sorted
 * @property {(row: any) => string} [title] shown on hover
 * @property {boolean} [isNumber]
 * @property {number} [width] rem; by default what the name of a number needs
 */

const SPARE_ROWS = 4; // above and below what is seen
const LOADED_ROWS = 14; // before the height is known

export class Table {
  /**
   * @param {HTMLElement} host
   * @param {string} label names the table
   * @param {Column[]} columns the first one names the row
   * @param {(row: any) => void} opened called when a row is chosen
   */
  constructor(host, label, columns, opened) {
    Object.assign(this, { columns, opened });
    this.all = [];
    this.rows = [];
    this.words = "";
    this.sorted = 0;
    this.isDescending = false;
    this.first = 0;
    this.height = 0; // of a row, once one was seen
    /** @type {HTMLTableRowElement[]} */
    this.pool = [];
    this.filter = /** @type {HTMLInputElement} */ (element("input", { type: "search" }));
    this.counted = element("small", { role: "status" });
    this.above = spacer();
    this.below = spacer();
    this.body = element("tbody", {}, this.above, this.below);
    this.heads = columns.map((column, index) => this.head(column, index));
    const widths = columns.map(
      (column) => column.width ?? (column.isNumber ? Math.max(3.1, 1.2 + 0.58 * column.name.length) : 6),
    );
    const cols = widths.map((width) => element("col"));
    cols.forEach((col, index) => {
      col.style.width = `${widths[index]}rem`;
    });
    this.table = element(
      "table",
      { "aria-label": label },
      element("colgroup", {}, ...cols),
      element("thead", {}, element("tr", {}, ...this.heads)),
      this.body,
    );
    this.table.style.minWidth = `${widths.reduce((all, width) => all + width)}rem`;
    this.view = element(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}, list` },
      this.table,
    );
    host.append(
      element("div", { class: "tools" }, element("label", {}, "Filter", this.filter), this.counted),
      this.view,
    );
    this.listen();
  }

  head(column, index) {
    if (!column.order) return element("th", { scope: "col" }, column.name);
    const button = element("button", { type: "button" }, column.name);
    button.addEventListener("click", () => {
      this.isDescending = this.sorted === index ? !this.isDescending : Boolean(column.isNumber);
      this.sorted = index;
      this.arrange();
    });
    return element("th", { scope: "col", class: column.isNumber ? "n" : "" }, button);
  }

  listen() {
    this.filter.addEventListener("input", () => {
      this.words = this.filter.value.trim().toLowerCase();
      this.arrange();
    });
    let isAsked = false;
    this.view.addEventListener(
      "scroll",
      () => {
        if (isAsked) return;
        isAsked = true;
        requestAnimationFrame(() => {
          isAsked = false;
          this.draw();
        });
      },
      { passive: true },
    );
    new ResizeObserver(() => {
      this.height = 0;
      this.draw();
    }).observe(this.view);
    this.body.addEventListener("click", (event) => {
      const row = this.rowOf(event.target);
      if (row) this.opened(row);
    });
    this.body.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
      if (step) {
        event.preventDefault();
        this.move(step);
      }
    });
  }

  /** Sort by the column of this name, the largest first. */
  sortBy(name) {
    this.sorted = this.columns.findIndex((column) => column.name === name);
    this.isDescending = true;
    this.arrange();
  }

  /** Show these rows instead. Their order and the filter stay. */
  update(rows) {
    this.all = rows;
    this.arrange();
  }

  arrange() {
    const { order } = this.columns[this.sorted];
    const shown = this.words
      ? this.all.filter((row) => this.textOf(row).includes(this.words))
      : [...this.all];
    if (order) shown.sort((one, other) => compare(order(one), order(other)) * (this.isDescending ? -1 : 1));
    this.rows = shown;
    this.heads.forEach((head, index) => {
      if (index !== this.sorted || !order) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
    });
    const all = this.all.length;
    setText(this.counted, shown.length === all ? `${all}` : `${shown.length} of ${all}`);
    this.table.setAttribute("aria-rowcount", String(shown.length + 1));
    this.draw(true);
  }

  textOf(row) {
    return this.columns
      .map((column) => (column.text ? column.text(row) : ""))
      .join(" ")
      .toLowerCase();
  }

  /** Show the rows that are seen. `isFresh`: with new values; otherwise rows that were there stay as they are. */
  draw(isFresh = false) {
    const height = this.rowHeight();
    const seen = this.view.clientHeight ? Math.ceil(this.view.clientHeight / height) : LOADED_ROWS;
    const num = Math.min(this.rows.length, seen + 2 * SPARE_ROWS);
    const isResized = this.resize(num);
    const top = Math.floor(this.view.scrollTop / height) - SPARE_ROWS;
    const first = Math.max(0, Math.min(top, this.rows.length - num));
    const moved = first - this.first;
    this.first = first;
    if (isFresh || isResized || Math.abs(moved) >= num)
      this.pool.forEach((row, index) => this.fill(row, first + index));
    else if (moved) this.rotate(moved);
    setHeight(this.above, first * height);
    setHeight(this.below, (this.rows.length - first - num) * height);
  }

  /** Make or remove rows of the document. Returns whether there was anything to do. */
  resize(num) {
    if (this.pool.length === num) return false;
    while (this.pool.length < num) {
      this.pool.push(this.makeRow());
      this.below.before(this.pool.at(-1));
    }
    while (this.pool.length > num) this.pool.pop().remove();
    return true;
  }

  /** Use the rows that left the view at one end for those that came at the other. */
  rotate(moved) {
    const last = this.pool.length - 1;
    for (let step = 0; step < moved; step += 1) {
      const row = this.pool.shift();
      this.pool.push(row);
      this.below.before(row);
      this.fill(row, this.first + last - moved + 1 + step);
    }
    for (let step = 0; step > moved; step -= 1) {
      const row = this.pool.pop();
      this.pool.unshift(row);
      this.above.after(row);
      this.fill(row, this.first - moved - 1 + step);
    }
  }

  rowHeight() {
    return (this.height ||= this.pool[0]?.offsetHeight) || 34;
  }

  makeRow() {
    const cells = this.columns.map((column, index) =>
      index
        ? element("td", column.isNumber ? { class: "n" } : {})
        : element("th", { scope: "row" }, element("button", { type: "button" })),
    );
    return /** @type {HTMLTableRowElement} */ (element("tr", {}, ...cells));
  }

  fill(target, index) {
    const row = this.rows[index];
    target.setAttribute("aria-rowindex", String(index + 2));
    this.columns.forEach((column, position) => {
      const cell = /** @type {HTMLElement} */ (target.cells[position]);
      if (column.draw) column.draw(cell, row);
      else setText(position ? cell : cell.firstElementChild, column.text(row));
      if (column.title && cell.title !== column.title(row)) cell.title = column.title(row);
    });
  }

  rowOf(target) {
    const index = this.pool.indexOf(target.closest("tr"));
    return index < 0 ? undefined : this.rows[this.first + index];
  }

  /** Move the focus by so many rows, and scroll there. */
  move(step) {
    const focused = this.pool.indexOf(document.activeElement?.closest("tr"));
    const index = Math.min(this.rows.length - 1, Math.max(0, this.first + focused + step));
    const height = this.rowHeight();
    const head = this.heads[0].offsetHeight;
    if (index * height < this.view.scrollTop) this.view.scrollTop = index * height;
    const bottom = (index + 1) * height + head - this.view.clientHeight;
    if (bottom > this.view.scrollTop) this.view.scrollTop = bottom;
    this.draw();
    this.pool[index - this.first]?.querySelector("button")?.focus();
  }
}

function spacer() {
  return element("tr", { class: "space", "aria-hidden": "true" }, element("td"));
}

function setHeight(row, height) {
  const wanted = `${height}px`;
  if (row.firstElementChild.style.height !== wanted) row.firstElementChild.style.height = wanted;
}
