/**
 * What the gateway tells: the points of the last 15 minutes, then a snapshot a second.
 *
 * @typedef {object} Point one moment of the charts; gateway/metrics/snapshot.py describes the fields
 * @property {number} time_s
 * @property {number} requests_per_s
 * @property {number} tokens_per_s
 * @property {number} sent_bytes_per_s
 * @property {number[]} ttft_s p50, p90, p99; empty without values
 * @property {number[]} itl_s
 * @property {number} num_open
 * @property {number} num_queued
 * @property {number} num_running
 * @property {number} num_waiting
 * @property {Object<string, number>} pages by state
 *
 * @typedef {object} Worker a row; a field that is absent is 0, "" or empty
 * @property {string} id
 * @property {string} name
 * @property {string} role
 * @property {string} node
 * @property {number} num_running
 * @property {number} num_waiting
 * @property {number} num_pages
 * @property {Object<string, number>} pages
 * @property {number} tokens_per_s
 * @property {number} sent_bytes_per_s
 * @property {Object<string, number>} sent_to bytes a second, by the id of the receiving worker
 *
 * @typedef {object} Snapshot
 * @property {string} model
 * @property {string} version
 * @property {Point} point
 * @property {string} level of overload
 * @property {number} oldest_wait_s
 * @property {number} head_away_s
 * @property {Worker[]} workers
 * @property {{status: any, counts: any}[]} tenants
 * @property {any[]} routers
 * @property {any[]} gateways
 * @property {any[]} plans of the planner, the latest first
 * @property {Object<string, number>} left_out
 */

export const HISTORY_S = 900;
const RETRY_MS = 2000;
const WORKER = {
  node: "",
  is_draining: false,
  is_asleep: false,
  beat_age_s: 0,
  num_attempts: 0,
  num_running: 0,
  num_waiting: 0,
  num_incoming: 0,
  num_outgoing: 0,
  num_pages: 0,
  pages: {},
  num_tokens: 0,
  tokens_per_s: 0,
  sent_bytes_per_s: 0,
  sent_to: {},
  num_preemptions: 0,
  prefix_queries_tokens: 0,
  prefix_hits_tokens: 0,
  num_draft_tokens: 0,
  num_accepted_tokens: 0,
  num_masks: 0,
  mask_us: 0,
  num_compiled_forms: 0,
  compile_us: 0,
  num_failed_forms: 0,
};

export class Feed {
  /**
   * @param {(points: Point[], snapshot: Snapshot) => void} told called with each snapshot
   * @param {(isLive: boolean) => void} changed called when the connection comes and goes
   */
  constructor(told, changed) {
    this.told = told;
    this.changed = changed;
    /** @type {Point[]} the oldest first */
    this.points = [];
  }

  /** Connect, and again after every loss. */
  open() {
    const source = new EventSource("ui/events");
    source.addEventListener("history", (event) => {
      this.points = JSON.parse(event.data);
    });
    source.addEventListener("snapshot", (event) => this.take(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      this.changed(false);
      source.close();
      setTimeout(() => this.open(), RETRY_MS);
    });
  }

  /** @param {Snapshot} snapshot */
  take(snapshot) {
    snapshot.workers = snapshot.workers.map((worker) => ({ ...WORKER, ...worker }));
    const last = this.points.at(-1);
    if (!last || last.time_s < snapshot.point.time_s) this.points.push(snapshot.point);
    while (this.points[0].time_s < snapshot.point.time_s - HISTORY_S) this.points.shift();
    this.changed(true);
    this.told(this.points, snapshot);
  }
}
