/** The list of the slowest or the latest requests. */
import { element, setText } from "./dom.js";
import { load } from "./details.js";
import { count, seconds } from "./format.js";
import { Table } from "./table.js";
import { drawParts, partsTitle } from "./timeline.js";

/**
 * @typedef {object} Summary docs/observe.md describes the fields
 * @property {string} request_id
 * @property {string} tenant
 * @property {string} outcome
 * @property {number} began_s since 1970
 * @property {number} total_s
 * @property {number|null} first_token_s
 * @property {Object<string, number>} seconds by the name of the part
 */

const MAX_SHOWN = 100;
const POLL_MS = 5000;
/** @type {import("./table.js").Column[]} */
const COLUMNS = [
  { name: "request", text: (row) => row.request_id, order: (row) => row.request_id, width: 21 },
  { name: "tenant", text: (row) => row.tenant || "-", order: (row) => row.tenant },
  { name: "outcome", text: (row) => row.outcome, order: (row) => row.outcome },
  {
    name: "time",
    text: (row) => seconds(row.total_s),
    order: (row) => row.total_s,
    isNumber: true,
    width: 5,
  },
  {
    name: "first token",
    text: (row) => seconds(row.first_token_s),
    order: (row) => row.first_token_s ?? 0,
    isNumber: true,
    width: 7,
  },
  { name: "where it went", width: 10, draw: drawParts, title: partsTitle },
  {
    name: "prompt",
    text: (row) => count(row.num_prompt_tokens),
    order: (row) => row.num_prompt_tokens,
    isNumber: true,
  },
  {
    name: "cached",
    text: (row) => count(row.num_cached_tokens),
    order: (row) => row.num_cached_tokens,
    isNumber: true,
  },
  { name: "tokens", text: (row) => count(row.num_tokens), order: (row) => row.num_tokens, isNumber: true },
  {
    name: "attempts",
    text: (row) => count(row.num_attempts),
    order: (row) => row.num_attempts,
    isNumber: true,
  },
  {
    name: "ended",
    text: (row) => new Date(1000 * (row.began_s + row.total_s)).toLocaleTimeString(),
    order: (row) => row.began_s + row.total_s,
    isNumber: true,
    width: 8,
  },
];

/** The list of requests. It asks the gateways while it is seen. */
export class RequestList {
  /**
   * @param {HTMLElement} host
   * @param {(id: string) => void} open called with the id of a request
   */
  constructor(host, open) {
    this.host = host;
    this.order = /** @type {HTMLSelectElement} */ (
      element(
        "select",
        {},
        element("option", { value: "slowest" }, "slowest"),
        element("option", { value: "latest" }, "latest"),
      )
    );
    this.tenant = /** @type {HTMLInputElement} */ (element("input", { size: "14", placeholder: "all" }));
    const id = /** @type {HTMLInputElement} */ (
      element("input", { size: "28", placeholder: "chatcmpl-\u2026" })
    );
    this.state = element("small", { role: "status" });
    const form = element(
      "form",
      { class: "tools" },
      element("label", {}, "Show the", this.order),
      element("label", {}, "of tenant", this.tenant),
      element("label", {}, "or the answer with id", id),
      element("button", { type: "submit" }, "Find"),
      this.state,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (id.value.trim()) open(id.value.trim().split("-").at(-1));
      else this.ask();
    });
    this.order.addEventListener("change", () => this.ask());
    this.tenant.addEventListener("change", () => this.ask());
    host.append(form);
    this.table = new Table(host, "Requests", COLUMNS, (row) => open(row.request_id));
    this.table.sortBy("time");
    this.filter = this.table.filter;
    this.askedAt = -Infinity;
  }

  /** Ask again if the last answer is old. */
  update() {
    if (performance.now() - this.askedAt > POLL_MS) this.ask();
  }

  async ask() {
    this.askedAt = performance.now();
    const query = new URLSearchParams({ order: this.order.value, limit: String(MAX_SHOWN) });
    if (this.tenant.value) query.set("tenant", this.tenant.value);
    const found = await load(`admin/requests?${query}`);
    setText(this.state, found ? "" : "the gateway does not answer");
    if (found) this.table.update(found.data);
  }
}
