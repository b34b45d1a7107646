/** Why a request went where it went: the predicted cost of every candidate, and what was measured. */
import { section } from "./details.js";
import { element } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

/** What a worker measures of the chosen pair, by the term that predicts it. */
const MEASURED = { queue_s: "waited_s", pull_s: "pulled_s", compute_s: "computed_s", handoff_s: "exposed_s" };

/**
 * Return what is said about one attempt.
 * @param {any} decision of `/admin/decisions/ID`
 * @param {Map<string, string>} names id -> name of a worker
 * @returns {Node[]}
 */
export function decisionParts(decision, names) {
  const to = pair(decision.chosen, names);
  const head = `Attempt ${decision.attempt}: ${count(decision.num_tokens)} tokens, by ${decision.reason}, to ${to}`;
  const candidates = decision.weighed.length ? decision.weighed : [decision.chosen];
  const sorted = [...candidates].sort((one, other) => cost(one) - cost(other));
  return [
    section("Why it went there"),
    element("p", {}, head),
    candidateTable(sorted, decision, names),
    ...outcome(decision),
  ];
}

function candidateTable(candidates, decision, names) {
  const terms = Object.keys(candidates[0].terms);
  const heads = ["pair", "held", ...terms.map((name) => name.replace(/_s$/, "").replace("_", " ")), "total"];
  const rows = candidates.map((each) => {
    const isChosen = pairKey(each) === pairKey(decision.chosen);
    const cells = [
      count(each.num_held_tokens),
      ...terms.map((name) => seconds(each.terms[name])),
      seconds(cost(each)),
    ];
    return row(pair(each, names), cells, isChosen ? "chosen" : "");
  });
  if (decision.measured)
    rows.splice(
      candidates.findIndex((each) => pairKey(each) === pairKey(decision.chosen)) + 1,
      0,
      measuredRow(decision, terms),
    );
  const head = element(
    "tr",
    {},
    ...heads.map((name, index) => element("th", { scope: "col", class: index ? "n" : "" }, name)),
  );
  const table = element(
    "table",
    { "aria-label": "Candidates by predicted cost" },
    element("thead", {}, head),
    element("tbody", {}, ...rows),
  );
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" },
    table,
  );
}

function measuredRow(decision, terms) {
  const measured = measuredOf(decision);
  const cells = terms.map((name) => (MEASURED[name] ? seconds(measured[MEASURED[name]]) : ""));
  const known = terms.reduce((all, name) => all + (MEASURED[name] ? measured[MEASURED[name]] : 0), 0);
  return row(
    "measured",
    [count(measured.num_tokens - measured.num_new_tokens), ...cells, seconds(known)],
    "measured",
  );
}

/** Name the fields of PrefillTimes, which travels as an array. */
function measuredOf({ measured }) {
  if (!Array.isArray(measured)) return measured;
  const names = [
    "request_id",
    "attempt",
    "waited_s",
    "computed_s",
    "num_new_tokens",
    "num_tokens",
    "pulled_bytes",
    "pulled_s",
    "moved_bytes",
    "exposed_s",
    "own_s",
  ];
  return Object.fromEntries(names.map((name, index) => [name, measured[index]]));
}

/** @returns {Node[]} */
function outcome(decision) {
  const lines = [];
  const expected = Object.keys(decision.chosen.terms).length
    ? `, ${seconds(firstToken(decision.chosen))} expected`
    : "";
  if (decision.first_token_s !== null)
    lines.push(`First token after ${seconds(decision.first_token_s)}${expected}.`);
  if (decision.regret_s !== null) lines.push(regret(decision.regret_s));
  if (decision.measured) {
    const times = measuredOf(decision);
    const computed = `Computed ${count(times.num_new_tokens)} of ${count(times.num_tokens)} tokens`;
    lines.push(`${computed}; pulled ${bytes(times.pulled_bytes)}, sent ${bytes(times.moved_bytes)}.`);
  }
  return lines.map((line) => element("p", { class: "note" }, line));
}

function regret(value) {
  const by = `${seconds(Math.abs(value))} ${value > 0 ? "after" : "before"}`;
  return `Regret: the first token came ${by} the time that was predicted for the best other pair.`;
}

function row(name, cells, kind) {
  return element(
    "tr",
    kind ? { class: kind } : {},
    element("th", { scope: "row" }, name),
    ...cells.map((cell) => element("td", { class: "n" }, cell)),
  );
}

function pair(weighed, names) {
  const name = (id) => names.get(id) ?? id.slice(0, 8);
  const source = weighed.source ? `, pulls from ${name(weighed.source)}` : "";
  return weighed.prefill
    ? `${name(weighed.prefill)} \u2192 ${name(weighed.decode)}${source}`
    : `${name(weighed.decode)} alone${source}`;
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
