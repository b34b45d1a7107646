/** The panel at the side with everything about one worker, tenant, gateway, router or request. */
import { byId, element, setText, Values } from "./dom.js";
import { bytes, count, rate, seconds, share } from "./format.js";
import { drawPages, pagesTitle, stateOf, STATES, total } from "./views.js";

export class Details {
  constructor() {
    this.panel = byId("details");
    this.title = byId("details-title");
    this.body = byId("details-body");
    /** @type {((snapshot: import("./feed.js").Snapshot) => void)|null} */
    this.refresh = null;
    this.before = null; // has the focus again afterwards
    byId("details-close").addEventListener("click", () => this.close());
  }

  get isOpen() {
    return !this.panel.hidden;
  }

  /**
   * @param {string} title
   * @param {Node[]} content
   * @param {((snapshot: import("./feed.js").Snapshot) => void)|null} refresh called with each snapshot
   */
  show(title, content, refresh = null) {
    if (!this.isOpen) this.before = document.activeElement;
    setText(this.title, title);
    this.body.replaceChildren(...content);
    this.refresh = refresh;
    this.panel.hidden = false;
    this.panel.scrollTop = 0;
    this.title.focus();
  }

  close() {
    this.panel.hidden = true;
    this.refresh = null;
    this.before?.focus?.();
  }
}

/**
 * Show a worker, and keep it fresh.
 * @param {Details} details
 * @param {import("./feed.js").Snapshot} snapshot
 * @param {string} id
 */
export function showWorker(details, snapshot, id) {
  const row = snapshot.workers.find((each) => each.id === id);
  const gone = element("p", { class: "empty" });
  const [bar, pages] = [element("div"), element("p", { class: "note" })];
  const names = ["Now", "Sends KV to", "Transports", "Counters and gauges", "Identity and limits"];
  const lists = names.map(() => new Values(element("dl", { class: "values" })));
  const [live, sent, transports, counters, identity] = lists;
  const sections = names.map((name, index) => [section(name), lists[index].list]);
  sections[0].push(section("KV pages"), bar, pages);
  const update = async (latest) => {
    const now = latest.workers.find((each) => each.id === id);
    setText(gone, now ? "" : "This worker has left the cluster.");
    if (!now) return;
    live.update(liveValues(now));
    drawPages(bar, now);
    setText(pages, `${pagesTitle(now)}. ${STATES.map(({ name, means }) => `${name}: ${means}`).join("; ")}.`);
    sent.update(sentValues(now, latest.workers));
    const whole = await load(`ui/workers/${id}`);
    if (!whole) return;
    transports.update(transportValues(whole.load.pairs));
    counters.update(countValues({ ...whole.load.counters, ...whole.load.gauges }));
    identity.update(allFields(whole.worker));
  };
  details.show(row ? row.name : id.slice(0, 8), [gone, ...sections.flat()], update);
  update(snapshot);
}

/** @returns {[string, string][]} */
function sentValues(row, workers) {
  const names = new Map(workers.map((each) => [each.id, each.name]));
  const rates = Object.entries(row.sent_to);
  if (!rates.length) return [["no worker", "now"]];
  return rates.map(([to, value]) => [names.get(to) ?? to.slice(0, 8), `${bytes(value)}/s`]);
}

/** @returns {[string, string][]} */
function transportValues(pairs) {
  if (!pairs.length) return [["none", "-"]];
  return pairs.map(([peer, inUse, best]) => [
    peer,
    inUse === best ? inUse : `${inUse}, fell back from ${best}`,
  ]);
}

/** @returns {[string, string][]} */
function countValues(counts) {
  const named = Object.entries(counts).sort();
  return named.length ? named.map(([name, value]) => [name, count(Number(value))]) : [["none", "-"]];
}

/** @returns {[string, string][]} */
function liveValues(row) {
  const compile_s = row.compile_us / 1e6 / Math.max(1, row.num_compiled_forms);
  return [
    ["role", row.role],
    ["node", row.node || "-"],
    ["state", stateOf(row)],
    ["last heartbeat", `${seconds(row.beat_age_s)} ago`],
    ["attempts", count(row.num_attempts)],
    ["running sequences", count(row.num_running)],
    ["waiting sequences", count(row.num_waiting)],
    ["transfers in, out", `${count(row.num_incoming)}, ${count(row.num_outgoing)}`],
    ["tokens", `${count(row.num_tokens)}, ${rate(row.tokens_per_s)}/s`],
    ["preemptions", count(row.num_preemptions)],
    [
      "prefix cache hits",
      `${share(row.prefix_hits_tokens, row.prefix_queries_tokens)} of ${count(row.prefix_queries_tokens)} tokens`,
    ],
    [
      "accepted drafts",
      `${share(row.num_accepted_tokens, row.num_draft_tokens)} of ${count(row.num_draft_tokens)} tokens`,
    ],
    [
      "token masks",
      row.num_masks
        ? `${count(row.num_masks)}, ${(row.mask_us / row.num_masks).toFixed(0)} \u00b5s each`
        : "0",
    ],
    [
      "grammars",
      `${count(row.num_compiled_forms)} compiled, ${seconds(compile_s)} each, ${count(row.num_failed_forms)} failed`,
    ],
  ];
}

/**
 * Show a tenant, and keep it fresh.
 * @param {Details} details
 * @param {import("./feed.js").Snapshot} snapshot
 * @param {string} name
 */
export function showTenant(details, snapshot, name) {
  const find = (latest) => latest.tenants.find((each) => each.status.tenant === name);
  showFields(details, snapshot, name, find, tenantValues);
}

/** @returns {[string, string][]} */
function tenantValues({ status, counts }) {
  const mean = status.num_dispatched ? status.waited_s / status.num_dispatched : 0;
  return [
    ["weight", String(status.weight)],
    ["queued at routers", count(status.num_queued)],
    ["longest wait", seconds(status.oldest_wait_s)],
    ["dispatched and running", count(status.num_active)],
    ["dispatched", `${count(status.num_dispatched)}, ${seconds(mean)} mean wait`],
    ["work", `${count(status.work_tokens)} tokens`],
    ["first tokens in time", `${count(status.num_met)}, ${count(status.num_missed)} late`],
    ["degraded", count(status.num_degraded)],
    ["refused by routers", listed(status.refused)],
    ["choices being answered", count(counts.num_open)],
    ["calls", listed(counts.calls)],
    ["prompt tokens", count(counts.prompt_tokens)],
    ["generated tokens", count(counts.generated_tokens)],
    ["objectives kept", listed(counts.met)],
    ["objectives missed", listed(counts.missed)],
  ];
}

/**
 * Show the fields of a row, and keep them fresh.
 * @param {Details} details
 * @param {import("./feed.js").Snapshot} snapshot
 * @param {string} title
 * @param {(snapshot: import("./feed.js").Snapshot) => any} find
 * @param {(row: any) => [string, string][]} valuesOf
 */
export function showFields(details, snapshot, title, find, valuesOf = allFields) {
  const values = new Values(element("dl", { class: "values" }));
  const update = (latest) => {
    const row = find(latest);
    if (row) values.update(valuesOf(row));
  };
  details.show(title, [values.list], update);
  update(snapshot);
}

/** @returns {[string, string][]} */
function allFields(row) {
  return Object.entries(row).map(([name, value]) => [name, plain(value)]);
}

/**
 * Return the JSON of a path, or null when it cannot be had.
 * @param {string} path
 */
export async function load(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

/** @param {string} title */
export function section(title) {
  return element("h3", {}, title);
}

function listed(counts) {
  return total(counts)
    ? Object.entries(counts)
        .map(([name, num]) => `${name} ${count(num)}`)
        .join(", ")
    : "0";
}

function plain(value) {
  if (Array.isArray(value)) return value.join(":");
  if (value && typeof value === "object")
    return (
      Object.entries(value)
        .map(([name, num]) => `${name} ${num}`)
        .join(", ") || "-"
    );
  return typeof value === "number" && !Number.isInteger(value)
    ? String(Number(value.toPrecision(4)))
    : String(value) || "-";
}
