/** Figures as text, and their order. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return whole.format(value);
}

/** @param {number} value with one digit where it is small */
export function rate(value) {
  return value > 0 && value < 100 ? value.toFixed(1) : count(value);
}

/** @param {number} value bytes */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** @param {number|null|undefined} value seconds */
export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 5e-6) return "0 s";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
}

/**
 * @param {number} part
 * @param {number} whole
 */
export function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "-";
}

const collator = new Intl.Collator("en", { numeric: true });

/**
 * Compare numbers, or texts so that decode-2 comes before decode-10.
 * @param {number|string} one
 * @param {number|string} other
 */
export function compare(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  return collator.compare(String(one), String(other));
}
