/** The figures of the page: tiles, charts, and the columns of each list. */
import { element } from "./dom.js";
import { inUse } from "./cluster_map.js";
import { bytes, count, rate, seconds, share } from "./format.js";

/** The states of KV pages that a bar shows, with their colours. The rest of a bar is free. */
export const STATES = [
  { name: "active", colour: "blue", means: "of sequences" },
  { name: "cached", colour: "green", means: "of cached prefixes" },
  { name: "leased", colour: "amber", means: "leased to transfers" },
  { name: "quarantined", colour: "red", means: "until every writer has let go" },
];

/**
 * @param {import("./feed.js").Snapshot} snapshot
 * @returns {[string, string][]}
 */
export function tiles({ point, level, oldest_wait_s }) {
  return [
    ["calls being answered", count(point.num_open)],
    ["requests/s", rate(point.requests_per_s)],
    ["tokens/s", rate(point.tokens_per_s)],
    ["TTFT p50", seconds(point.ttft_s[0])],
    ["TTFT p99", seconds(point.ttft_s[2])],
    ["ITL p99", seconds(point.itl_s[2])],
    ["queued requests", count(point.num_queued)],
    ["longest wait", seconds(oldest_wait_s)],
    ["overload", level.replace("_", " ")],
  ];
}

const percentiles = (field) =>
  ["p50", "p90", "p99"].map((name, index) => ({
    name,
    colour: ["green", "amber", "red"][index],
    read: (point) => point[field][index] ?? null,
  }));

/**
 * @type {{title: string, series: import("./chart.js").Series[], format: (value: number) => string,
 *   isStacked?: boolean, base?: number}[]}
 */
export const CHARTS = [
  {
    title: "Tokens/s",
    format: rate,
    series: [{ name: "generated", colour: "blue", read: (point) => point.tokens_per_s }],
  },
  {
    title: "Requests/s",
    format: rate,
    series: [{ name: "ended", colour: "blue", read: (point) => point.requests_per_s }],
  },
  { title: "Time to first token", format: seconds, series: percentiles("ttft_s") },
  { title: "Inter-token latency", format: seconds, series: percentiles("itl_s") },
  {
    title: "Calls being answered",
    format: count,
    series: [{ name: "open", colour: "blue", read: (point) => point.num_open }],
  },
  {
    title: "Sequences and queue",
    format: count,
    series: [
      { name: "running", colour: "blue", read: (point) => point.num_running },
      { name: "without pages", colour: "amber", read: (point) => point.num_waiting },
      { name: "queued", colour: "red", read: (point) => point.num_queued },
    ],
  },
  {
    title: "KV pages",
    format: count,
    isStacked: true,
    series: [
      ...STATES.map(({ name, colour }) => ({ name, colour, read: (point) => point.pages[name] ?? 0 })),
      { name: "free", colour: "line", read: (point) => point.pages.free ?? 0 },
    ],
  },
  {
    title: "KV transfers",
    format: (value) => `${bytes(value)}/s`,
    base: 1024,
    series: [{ name: "sent", colour: "violet", read: (point) => point.sent_bytes_per_s }],
  },
];

const number = (name, order, text = count) => ({
  name,
  order,
  text: (row) => text(order(row)),
  isNumber: true,
});

/** @returns {string} the state of a worker */
export function stateOf(row) {
  return row.is_asleep ? "sleeps" : row.is_draining ? "drains" : "serves";
}

/** @type {import("./table.js").Column[]} */
export const WORKER_COLUMNS = [
  { name: "name", text: (row) => row.name, order: (row) => row.name, width: 9.5 },
  { name: "role", text: (row) => row.role, order: (row) => row.role, width: 5 },
  { name: "node", text: (row) => row.node || "-", order: (row) => row.node },
  {
    name: "state",
    width: 4.8,
    text: stateOf,
    order: (row) => (row.is_draining ? 0 : 1),
  },
  number("running", (row) => row.num_running),
  number("waiting", (row) => row.num_waiting),
  number("tokens/s", (row) => row.tokens_per_s, rate),
  {
    name: "KV pages",
    width: 10,
    draw: drawPages,
    order: (row) => (row.num_pages ? inUse(row) / row.num_pages : 0),
    isNumber: true,
    title: pagesTitle,
  },
  {
    name: "in use",
    text: (row) => share(inUse(row), row.num_pages),
    order: (row) => (row.num_pages ? inUse(row) / row.num_pages : 0),
    isNumber: true,
  },
  {
    name: "hits",
    text: (row) => share(row.prefix_hits_tokens, row.prefix_queries_tokens),
    order: (row) => ratio(row.prefix_hits_tokens, row.prefix_queries_tokens),
    isNumber: true,
  },
  number("in", (row) => row.num_incoming),
  number("out", (row) => row.num_outgoing),
  { ...number("sent/s", (row) => row.sent_bytes_per_s, bytes), width: 6 },
  {
    name: "drafts",
    text: (row) => share(row.num_accepted_tokens, row.num_draft_tokens),
    order: (row) => ratio(row.num_accepted_tokens, row.num_draft_tokens),
    isNumber: true,
    title: (row) => `${row.num_accepted_tokens} of ${row.num_draft_tokens} draft tokens accepted`,
  },
  {
    name: "mask",
    width: 4.6,
    text: (row) => (row.num_masks ? `${Math.round(row.mask_us / row.num_masks)} \u00b5s` : "-"),
    order: (row) => ratio(row.mask_us, row.num_masks),
    isNumber: true,
    title: (row) => {
      const grammars = `${row.num_compiled_forms} grammars compiled, ${row.num_failed_forms} failed`;
      return `${row.num_masks} token masks of structured output; ${grammars}`;
    },
  },
];

/** @type {import("./table.js").Column[]} */
export const TENANT_COLUMNS = [
  { name: "name", text: (row) => row.status.tenant, order: (row) => row.status.tenant, width: 14 },
  number(
    "weight",
    (row) => row.status.weight,
    (value) => `${Number(value.toPrecision(3))}`,
  ),
  number("active", (row) => row.status.num_active),
  number("queued", (row) => row.status.num_queued),
  { ...number("longest wait", (row) => row.status.oldest_wait_s, seconds), width: 7 },
  { ...number("work tokens", (row) => row.status.work_tokens), width: 7 },
  {
    name: "in time",
    text: (row) => share(row.status.num_met, row.status.num_met + row.status.num_missed),
    order: (row) => ratio(row.status.num_met, row.status.num_met + row.status.num_missed),
    isNumber: true,
  },
  number("degraded", (row) => row.status.num_degraded),
  number("refused", (row) => total(row.status.refused)),
  number("calls", (row) => total(row.counts.calls)),
  number("generated", (row) => row.counts.generated_tokens),
];

/** @type {import("./table.js").Column[]} */
export const GATEWAY_COLUMNS = [
  { name: "name", text: (row) => row.name, order: (row) => row.name },
  { name: "node", text: (row) => row.node || "-", order: (row) => row.node },
  { name: "clients at", text: (row) => row.address || "-", order: (row) => row.address, width: 10 },
  number("calls now", (row) => row.num_open),
  number("refused", (row) => row.num_refused),
  ...[
    ["requests", "num_requests", count],
    ["requests/s", "requests_per_s", rate],
    ["tokens", "num_tokens", count],
    ["tokens/s", "tokens_per_s", rate],
    ["replays", "num_replays", count],
    ["refused forms", "num_refused_forms", count],
    ["form check p99", "form_check_p99_s", seconds],
    ["clients gone", "num_clients_gone", count],
  ].map(([name, field, text]) => ({
    name,
    isNumber: true,
    width: 1 + 0.55 * Math.max(9, name.length),
    order: (row) => row[field],
    text: (row) => (row.is_here ? text(row[field]) : "-"),
  })),
];

/** @type {import("./table.js").Column[]} */
export const ROUTER_COLUMNS = [
  { name: "id", text: (row) => row.id.slice(0, 8), order: (row) => row.id },
  { name: "node", text: (row) => row.node || "-", order: (row) => row.node },
  { ...number("pid", (row) => row.pid, String), width: 5 },
  number("attempts", (row) => row.num_attempts),
  number("queued", (row) => row.num_queued),
  { ...number("longest wait", (row) => row.oldest_wait_s, seconds), width: 7 },
  { name: "overload", text: (row) => row.level.replace("_", " "), order: (row) => row.level },
  number("routed", (row) => row.num_routed),
  number("routed/s", (row) => row.routed_per_s, rate),
  number("choice p99", (row) => row.routing_p99_s, seconds),
  number(
    "blind",
    (row) => row.blind_share,
    (value) => `${(100 * value).toFixed(1)}%`,
  ),
  { name: "Redis", text: (row) => row.redis, order: (row) => row.redis },
];

const attained = (value) => (value === null ? "-" : `${(100 * value).toFixed(1)}%`);

/** @type {import("./table.js").Column[]} */
export const PLAN_COLUMNS = [
  { name: "plan", text: (row) => row.id, order: (row) => row.before_s, width: 7 },
  { ...number("before the latest", (row) => row.before_s, seconds), width: 9 },
  { name: "outcome", text: (row) => row.outcome, order: (row) => row.outcome, width: 6 },
  { name: "workers", text: (row) => row.workers, order: (row) => row.workers, width: 6 },
  { name: "actions", text: (row) => row.actions || "-", order: (row) => row.actions, width: 14 },
  { ...number("predicted", (row) => row.predicted, attained), width: 6 },
  { ...number("came", (row) => row.came, attained), width: 5 },
  { name: "reason", text: (row) => row.reason, order: (row) => row.reason, width: 30 },
];

/** Draw the pages of a worker by state. */
export function drawPages(cell, row) {
  if (!cell.firstChild)
    cell.append(
      element("div", { class: "bar" }, ...STATES.map(({ colour }) => element("span", { class: colour }))),
    );
  STATES.forEach(({ name }, index) => {
    const width = row.num_pages ? `${((100 * (row.pages[name] ?? 0)) / row.num_pages).toFixed(1)}%` : "0%";
    const part = cell.firstChild.children[index];
    if (part.style.width !== width) part.style.width = width;
  });
}

/** Return the pages of a worker by state, in words. */
export function pagesTitle(row) {
  return Object.entries(row.pages)
    .map(([state, num]) => `${count(num)} ${state}`)
    .join(", ");
}

function ratio(part, whole) {
  return whole ? part / whole : 0;
}

/** Return the sum of the values. */
export function total(counts) {
  return Object.values(counts).reduce((all, each) => all + each, 0);
}
