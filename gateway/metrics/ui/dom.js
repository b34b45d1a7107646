/**
 * Elements. Text from outside, such as names of workers and tenants, is only ever set as textContent: nothing
 * of this page parses HTML.
 */

/**
 * Make an element.
 * @param {string} tag
 * @param {Object<string, string>} [attributes] `class` and the like
 * @param {...(Node|string)} children a string becomes a text node
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/**
 * Return the element of the page with this id.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/**
 * Set the text of an element, and leave the document alone when it is the same.
 * @param {Node} target
 * @param {string} text
 */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** A list of names and values that changes in place, so that a selection of its text survives an update. */
export class Values {
  /** @param {HTMLElement} list a `dl` */
  constructor(list) {
    this.list = list;
    /** @type {Map<string, HTMLElement>} */
    this.cells = new Map();
  }

  /** @param {[string, string][]} pairs in their order */
  update(pairs) {
    const names = pairs.map(([name]) => name);
    if (names.join("\0") !== [...this.cells.keys()].join("\0")) {
      this.cells = new Map(names.map((name) => [name, element("dd")]));
      this.list.replaceChildren(
        ...[...this.cells].map(([name, cell]) => element("div", {}, element("dt", {}, name), cell)),
      );
    }
    for (const [name, value] of pairs) setText(/** @type {Node} */ (this.cells.get(name)), value);
  }
}

/**
 * Return the colour that the style sheet gives a name in the theme of now.
 * @param {string} name such as "blue"
 */
export function colour(name) {
  probe.style.color = `var(--${name})`; // a variable itself is not resolved
  return getComputedStyle(probe).color;
}

const probe = element("span", { hidden: "" });
document.body.append(probe);

/**
 * Fit a canvas to its size on the page and return its context, scaled to CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width CSS pixels
 * @param {number} height CSS pixels
 */
export function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== columns || canvas.height !== rows)
    Object.assign(canvas, { width: columns, height: rows });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
