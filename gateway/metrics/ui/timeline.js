/** One request: its timeline as a waterfall, then the candidate pairs of its routing. */
import { decisionParts } from "./decision.js";
import { load, section } from "./details.js";
import { element } from "./dom.js";
import { count, seconds } from "./format.js";

/** Colours of parts, by the first pattern that their names match. */
const PART_COLOURS = [
  [/_computing$/, "blue"],
  [/queued$|_waiting$|^refused$/, "amber"],
  [/transfer|pulled|delivered|first_token|dispatched/, "violet"],
  [/preempted|replayed|lost|cancelled|unaccounted/, "red"],
  [/./, "green"],
];

/**
 * Show the timeline and the routing of a request.
 * @param {import("./details.js").Details} details
 * @param {import("./feed.js").Snapshot} snapshot
 * @param {string} id 32 hex digits
 */
export async function showRequest(details, snapshot, id) {
  const path = encodeURIComponent(id);
  const [timeline, decisions] = await Promise.all([
    load(`admin/requests/${path}`),
    load(`admin/decisions/${path}`),
  ]);
  const names = new Map(snapshot.workers.map((each) => [each.id, each.name]));
  const routed = decisions
    ? decisions.data.flatMap((decision) => decisionParts(decision, names))
    : [
        section("Why it went there"),
        missing("The routers do not know this request. They remember the latest ones."),
      ];
  const parts = timeline
    ? timelineParts(timeline)
    : [missing("No gateway has a timeline of this request: it runs, or it ended too long ago.")];
  details.show(`Request ${id}`, [...parts, ...routed]);
}

function missing(text) {
  return element("p", { class: "empty" }, text);
}

/** @returns {Node[]} */
function timelineParts(timeline) {
  const { num_ahead, ahead_tenant, num_prompt_tokens, num_cached_tokens, num_tokens, gateway } = timeline;
  const of = ahead_tenant ? `, most of ${ahead_tenant}` : "";
  const behind = num_ahead ? `, behind ${count(num_ahead)} in the queue${of}` : "";
  const first = seconds(timeline.first_token_s);
  const head = `${timeline.outcome} in ${seconds(timeline.total_s)}, first token after ${first}${behind}.`;
  const prompt = `${count(num_prompt_tokens)} prompt tokens, ${count(num_cached_tokens)} of them cached`;
  const size = `${prompt}; ${count(num_tokens)} tokens answered by ${gateway}.`;
  const end = timeline.parts.reduce((all, part) => Math.max(all, part.begin_s + part.seconds), 0);
  const rest = {
    name: "unaccounted",
    begin_s: Math.min(end, timeline.total_s - timeline.unaccounted_s),
    seconds: timeline.unaccounted_s,
    process: "",
  };
  const rows = [...timeline.parts, rest].map((part) => waterfallRow(part, timeline.total_s));
  const clocks = `Clocks agree within ${seconds(timeline.clock_error_s)}.`;
  const hidden = `Pages sent while computing: ${seconds(timeline.hidden_transfer_s)}. ${clocks}`;
  return [
    section("Where the time went"),
    element("p", {}, head),
    element("p", { class: "note" }, size),
    element("div", { class: "flow", role: "list", "aria-label": "Parts of the request's time" }, ...rows),
    element("p", { class: "note" }, hidden),
    ...attemptParts(timeline.attempts),
  ];
}

function waterfallRow(part, total) {
  const bar = element("span", { class: partColour(part.name) });
  bar.style.left = `${(100 * part.begin_s) / total}%`;
  bar.style.width = `${(100 * part.seconds) / total}%`;
  const share = `${((100 * part.seconds) / total).toFixed(1)}%`;
  return element(
    "div",
    { role: "listitem" },
    element("span", {}, part.name.replaceAll("_", " "), " ", element("small", {}, part.process)),
    element("span", { class: "track" }, bar),
    element("span", { class: "n" }, `${seconds(part.seconds)}, ${share}`),
  );
}

/** @returns {Node[]} */
function attemptParts(attempts) {
  if (attempts.length < 2) return [];
  const lines = attempts.map((each) => {
    const workers = [each.prefill, each.decode].filter(Boolean).join(" \u2192 ") || "no worker";
    const times = `${seconds(each.begin_s)} to ${seconds(each.end_s)}`;
    return `Attempt ${each.number}: ${workers}, ${times}, ${count(each.num_tokens)} tokens, ${each.end}.`;
  });
  return lines.map((line) => element("p", { class: "note" }, line));
}

/** Draw the parts of a request's time beside each other. */
export function drawParts(cell, row) {
  const parts = Object.entries(row.seconds).filter(([, value]) => value > 0);
  const bar = cell.firstChild ?? cell.appendChild(element("div", { class: "bar" }));
  bar.replaceChildren(
    ...parts.map(([name, value]) => {
      const part = element("span", { class: partColour(name) });
      part.style.width = `${(100 * value) / row.total_s}%`;
      return part;
    }),
  );
}

/** Return the parts of a request's time in words. */
export function partsTitle(row) {
  return Object.entries(row.seconds)
    .map(([name, value]) => `${name} ${seconds(value)}`)
    .join(", ");
}

function partColour(name) {
  return PART_COLOURS.find(([pattern]) => pattern.test(name))[1];
}
