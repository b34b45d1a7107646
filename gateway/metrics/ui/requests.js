/**
 * Requests: the slowest and the latest, where the time of one went, and why it went where it went, with the
 * predicted and the measured cost of every candidate.
 */
import { element, setText } from "./dom.js";
import { load, section } from "./details.js";
import { bytes, count, seconds } from "./format.js";
import { Table } from "./table.js";

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
/** What a worker measures of the chosen pair, by the term that predicts it. */
const MEASURED = { queue_s: "waited_s", pull_s: "pulled_s", compute_s: "computed_s", handoff_s: "exposed_s" };
/** Colours of parts by how their names end or begin; the rest is grey. */
const PART_COLOURS = [
  [/_computing$/, "blue"], [/queued$|_waiting$|^refused$/, "amber"], [/transfer|pulled|delivered|first_token|dispatched/, "violet"],
  [/preempted|replayed|lost|cancelled|unaccounted/, "red"], [/./, "green"],
];

/** @type {import("./table.js").Column[]} */
const COLUMNS = [
  { name: "request", text: (row) => row.request_id, order: (row) => row.request_id, width: 20 },
  { name: "tenant", text: (row) => row.tenant || "-", order: (row) => row.tenant },
  { name: "outcome", text: (row) => row.outcome, order: (row) => row.outcome },
  { name: "time", text: (row) => seconds(row.total_s), order: (row) => row.total_s, isNumber: true },
  { name: "first token", text: (row) => seconds(row.first_token_s), order: (row) => row.first_token_s ?? 0, isNumber: true, width: 7 },
  { name: "where it went", width: 10, draw: drawParts, title: partsTitle },
  { name: "prompt", text: (row) => count(row.num_prompt_tokens), order: (row) => row.num_prompt_tokens, isNumber: true },
  { name: "cached", text: (row) => count(row.num_cached_tokens), order: (row) => row.num_cached_tokens, isNumber: true },
  { name: "tokens", text: (row) => count(row.num_tokens), order: (row) => row.num_tokens, isNumber: true },
  { name: "attempts", text: (row) => count(row.num_attempts), order: (row) => row.num_attempts, isNumber: true },
  { name: "ended", text: (row) => new Date(1000 * (row.began_s + row.total_s)).toLocaleTimeString(), order: (row) => row.began_s + row.total_s, isNumber: true, width: 8 },
];

/** The list of requests. It asks the gateways while it is seen. */
export class RequestList {
  /**
   * @param {HTMLElement} host
   * @param {(id: string) => void} open called with the id of a request
   */
  constructor(host, open) {
    this.host = host;
    this.order = /** @type {HTMLSelectElement} */ (element("select", {}, element("option", { value: "slowest" }, "slowest"), element("option", { value: "latest" }, "latest")));
    this.tenant = /** @type {HTMLInputElement} */ (element("input", { size: "14", placeholder: "all" }));
    const id = /** @type {HTMLInputElement} */ (element("input", { size: "28", placeholder: "chatcmpl-\u2026" }));
    this.state = element("small", { role: "status" });
    const form = element("form", { class: "tools" },
      element("label", {}, "Show the", this.order), element("label", {}, "of tenant", this.tenant),
      element("label", {}, "or the answer with id", id), element("button", { type: "submit" }, "Find"), this.state);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (id.value.trim()) open(id.value.trim().split("-").at(-1));
      else this.ask();
    });
    this.order.addEventListener("change", () => this.ask());
    this.tenant.addEventListener("change", () => this.ask());
    host.append(form);
    this.table = new Table(host, "Requests", COLUMNS, (row) => row.request_id, (row) => open(row.request_id));
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

/**
 * Show where the time of a request went, and how it was routed.
 * @param {import("./details.js").Details} details
 * @param {import("./feed.js").Snapshot} snapshot
 * @param {string} id 32 hex digits
 */
export async function showRequest(details, snapshot, id) {
  const path = encodeURIComponent(id);
  const [timeline, decisions] = await Promise.all([load(`admin/requests/${path}`), load(`admin/decisions/${path}`)]);
  const names = new Map(snapshot.workers.map((each) => [each.id, each.name]));
  const routed = decisions
    ? decisions.data.flatMap((decision) => decisionParts(decision, names))
    : [section("Why it went there"), missing("The routers do not know this request. They remember the latest ones.")];
  const parts = timeline ? timelineParts(timeline) : [missing("No gateway has a timeline of this request: it runs, or it ended too long ago.")];
  details.show(`Request ${id}`, [...parts, ...routed]);
}

function missing(text) {
  return element("p", { class: "empty" }, text);
}

/** @returns {Node[]} */
function timelineParts(timeline) {
  const behind = timeline.num_ahead ? `, behind ${count(timeline.num_ahead)} in the queue${timeline.ahead_tenant ? `, most of ${timeline.ahead_tenant}` : ""}` : "";
  const head = `${timeline.outcome} in ${seconds(timeline.total_s)}, first token after ${seconds(timeline.first_token_s)}${behind}.`;
  const size = `${count(timeline.num_prompt_tokens)} prompt tokens, ${count(timeline.num_cached_tokens)} of them cached; ${count(timeline.num_tokens)} tokens answered by ${timeline.gateway}.`;
  const end = timeline.parts.reduce((all, part) => Math.max(all, part.begin_s + part.seconds), 0);
  const rest = { name: "unaccounted", begin_s: Math.min(end, timeline.total_s - timeline.unaccounted_s), seconds: timeline.unaccounted_s, process: "" };
  const rows = [...timeline.parts, rest].map((part) => waterfallRow(part, timeline.total_s));
  const hidden = `Pages sent while computing: ${seconds(timeline.hidden_transfer_s)}. Clocks agree within ${seconds(timeline.clock_error_s)}.`;
  return [
    section("Where the time went"), element("p", {}, head), element("p", { class: "note" }, size),
    element("div", { class: "flow", role: "list", "aria-label": "Parts of the request's time" }, ...rows),
    element("p", { class: "note" }, hidden), ...attemptParts(timeline.attempts),
  ];
}

function waterfallRow(part, total) {
  const bar = element("span", { class: partColour(part.name) });
  bar.style.left = `${(100 * part.begin_s) / total}%`;
  bar.style.width = `${(100 * part.seconds) / total}%`;
  const share = `${((100 * part.seconds) / total).toFixed(1)}%`;
  return element("div", { role: "listitem" },
    element("span", {}, part.name.replaceAll("_", " "), " ", element("small", {}, part.process)),
    element("span", { class: "track" }, bar),
    element("span", { class: "n" }, `${seconds(part.seconds)}, ${share}`));
}

/** @returns {Node[]} */
function attemptParts(attempts) {
  if (attempts.length < 2) return [];
  const lines = attempts.map((each) => `Attempt ${each.number}: ${each.prefill || each.decode || "no worker"} to ${each.decode || "no worker"}, ${seconds(each.begin_s)} to ${seconds(each.end_s)}, ${count(each.num_tokens)} tokens, ${each.end}.`);
  return lines.map((line) => element("p", { class: "note" }, line));
}

/** Draw the parts of a request's time beside each other. */
function drawParts(cell, row) {
  const parts = Object.entries(row.seconds).filter(([, value]) => value > 0);
  const bar = cell.firstChild ?? cell.appendChild(element("div", { class: "bar" }));
  bar.replaceChildren(...parts.map(([name, value]) => {
    const part = element("span", { class: partColour(name) });
    part.style.width = `${(100 * value) / row.total_s}%`;
    return part;
  }));
}

function partsTitle(row) {
  return Object.entries(row.seconds).map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
}

function partColour(name) {
  return PART_COLOURS.find(([pattern]) => pattern.test(name))[1];
}

/** @returns {Node[]} */
export function decisionParts(decision, names) {
  const head = `Attempt ${decision.attempt}: ${count(decision.num_tokens)} tokens, by ${decision.reason}, to ${pair(decision.chosen, names)}`;
  const candidates = decision.weighed.length ? decision.weighed : [decision.chosen];
  const sorted = [...candidates].sort((one, other) => cost(one) - cost(other));
  return [section("Why it went there"), element("p", {}, head), candidateTable(sorted, decision, names), ...outcome(decision)];
}

function candidateTable(candidates, decision, names) {
  const terms = Object.keys(candidates[0].terms);
  const heads = ["pair", "held", ...terms.map((name) => name.replace(/_s$/, "").replace("_", " ")), "total"];
  const rows = candidates.map((each) => {
    const isChosen = pairKey(each) === pairKey(decision.chosen);
    const cells = [count(each.num_held_tokens), ...terms.map((name) => seconds(each.terms[name])), seconds(cost(each))];
    return row(pair(each, names), cells, isChosen ? "chosen" : "");
  });
  if (decision.measured) rows.splice(candidates.findIndex((each) => pairKey(each) === pairKey(decision.chosen)) + 1, 0, measuredRow(decision, terms));
  const head = element("tr", {}, ...heads.map((name, index) => element("th", { scope: "col", class: index ? "n" : "" }, name)));
  const table = element("table", { "aria-label": "Candidates by predicted cost" }, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" }, table);
}

function measuredRow(decision, terms) {
  const measured = measuredOf(decision);
  const cells = terms.map((name) => (MEASURED[name] ? seconds(measured[MEASURED[name]]) : ""));
  const known = terms.reduce((all, name) => all + (MEASURED[name] ? measured[MEASURED[name]] : 0), 0);
  return row("measured", [count(measured.num_tokens - measured.num_new_tokens), ...cells, seconds(known)], "measured");
}

/** Name the fields of PrefillTimes, which travels as an array. */
function measuredOf({ measured }) {
  if (!Array.isArray(measured)) return measured;
  const names = ["request_id", "attempt", "waited_s", "computed_s", "num_new_tokens", "num_tokens", "pulled_bytes", "pulled_s", "moved_bytes", "exposed_s", "own_s"];
  return Object.fromEntries(names.map((name, index) => [name, measured[index]]));
}

/** @returns {Node[]} */
function outcome(decision) {
  const lines = [];
  const expected = Object.keys(decision.chosen.terms).length ? `, ${seconds(firstToken(decision.chosen))} expected` : "";
  if (decision.first_token_s !== null) lines.push(`First token after ${seconds(decision.first_token_s)}${expected}.`);
  if (decision.regret_s !== null) lines.push(`Regret ${seconds(Math.abs(decision.regret_s))} ${decision.regret_s > 0 ? "slower" : "faster"} than the best other pair was predicted.`);
  if (decision.measured) {
    const times = measuredOf(decision);
    lines.push(`Computed ${count(times.num_new_tokens)} of ${count(times.num_tokens)} tokens; pulled ${bytes(times.pulled_bytes)}, sent ${bytes(times.moved_bytes)}.`);
  }
  return lines.map((line) => element("p", { class: "note" }, line));
}

function row(name, cells, kind) {
  return element("tr", kind ? { class: kind } : {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", { class: "n" }, cell)));
}

function pair(weighed, names) {
  const name = (id) => names.get(id) ?? id.slice(0, 8);
  const source = weighed.source ? `, pulls from ${name(weighed.source)}` : "";
  return weighed.prefill ? `${name(weighed.prefill)} \u2192 ${name(weighed.decode)}${source}` : `${name(weighed.decode)} alone${source}`;
}

function pairKey(weighed) {
  return `${weighed.prefill} ${weighed.decode} ${weighed.source}`;
}

function cost(weighed) {
  return Object.values(weighed.terms).reduce((all, each) => all + each, 0);
}

function firstToken(weighed) {
  return ["queue_s", "pull_s", "compute_s"].reduce((all, name) => all + (weighed.terms[name] ?? 0), 0);
}
