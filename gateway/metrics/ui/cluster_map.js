/**
 * The cluster as a picture: lanes of gateways, routers, prefill and decode workers. Boxes are buttons; one
 * canvas below them has the lines. A lane of many workers shows machines, or the busiest and the rest.
 */
import { colour, element, fitted, setText } from "./dom.js";
import { bytes, compare, count, rate, share } from "./format.js";

/**
 * @typedef {object} Box
 * @property {string} key
 * @property {string} name
 * @property {string} stat
 * @property {number} use share of KV pages in use, 0 to 1
 * @property {string[]} ids of the workers in it
 * @property {() => void} open
 */

const MAX_BOXES = 10; // of a lane
const BOX_HEIGHT = 42,
  BOX_GAP = 8,
  HEAD = 32,
  LEFT = 10; // pixels
const LANES = ["Gateways", "Routers", "Prefill", "Decode"];
const BOX_SHARE = 0.7; // of a lane's width
const MAX_LABELS = 8; // rates written beside lines
const FRAME_MS = 33;
const QUIET_MS = 200; // after a scroll event: flows stand still, so that scrolling has the processor
const PICKED_MS = 20_000; // the boxes of a crowded lane stay for so long
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class ClusterMap {
  /**
   * @param {HTMLElement} host
   * @param {{worker: (id: string) => void, workers: (filter: string) => void, list: (name: string) => void}} open
   */
  constructor(host, open) {
    this.open = open;
    // The flows move: they have a canvas of their own, no larger than the gap between two lanes.
    [this.lines, this.stream] = [0, 1].map(
      () => /** @type {HTMLCanvasElement} */ (element("canvas", { "aria-hidden": "true" })),
    );
    this.plane = element("div", { class: "plane" }, this.lines, this.stream);
    this.lanes = LANES.map((name) => element("span", { class: "lane" }, name));
    this.plane.append(...this.lanes);
    host.append(this.plane);
    /** @type {Map<string, HTMLElement>} */
    this.boxes = new Map();
    /** @type {Map<string, {x: number, y: number, width: number}>} */
    this.places = new Map();
    /** @type {{from: string, to: string, rate: number}[]} */
    this.flows = [];
    this.drawnAt = 0;
    /** @type {Map<string, {at: number, keys: Set<string>}>} what a crowded lane shows, by lane */
    this.picked = new Map();
    this.isSeen = true;
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      this.wake();
    }).observe(host);
    new ResizeObserver(() => this.arrange()).observe(host);
    calm.addEventListener("change", () => this.wake());
    this.quietUntil = 0;
    const quiet = () => {
      this.quietUntil = performance.now() + QUIET_MS;
    };
    document.addEventListener("scroll", quiet, { capture: true, passive: true });
  }

  /** @param {import("./feed.js").Snapshot} snapshot */
  update(snapshot) {
    const prefill = this.workerBoxes(
      "prefill",
      snapshot.workers.filter((each) => each.role === "prefill"),
    );
    const decode = this.workerBoxes(
      "decode",
      snapshot.workers.filter((each) => each.role !== "prefill"),
    );
    this.columns = [
      this.gatewayBoxes(snapshot.gateways),
      this.routerBoxes(snapshot.routers),
      prefill,
      decode,
    ];
    this.flows = flowsOf(snapshot.workers, [...prefill, ...decode]);
    this.arrange();
    this.wake();
  }

  gatewayBoxes(gateways) {
    return this.fold(
      "gateway",
      gateways,
      (each) => each.name,
      (each) => each.requests_per_s,
      (some, name) => ({
        name: name ? `gateway ${name}` : `${some.length} other gateways`,
        stat: `${count(sum(some, "num_open"))} calls, ${rate(sum(some, "requests_per_s"))}/s`,
        use: 0,
        ids: [],
        open: () => this.open.list("gateways"),
      }),
    );
  }

  routerBoxes(routers) {
    return this.fold(
      "router",
      routers,
      (each) => each.id,
      (each) => each.routed_per_s,
      (some, id) => ({
        name: id ? `router ${id.slice(0, 8)}` : `${some.length} other routers`,
        stat: `${count(sum(some, "num_queued"))} queued, ${rate(sum(some, "routed_per_s"))}/s`,
        use: 0,
        ids: [],
        open: () => this.open.list("routers"),
      }),
    );
  }

  workerBoxes(role, workers) {
    const nodes = groupBy(workers, (each) => each.node);
    if (workers.length <= MAX_BOXES || nodes.size < 2)
      return this.fold(
        role,
        workers,
        (each) => each.id,
        busyness,
        (some, id) => this.workerBox(some, id ? some[0].name : `${some.length} other workers`),
      );
    const weight = ([, some]) => some.reduce((all, each) => all + busyness(each), 0);
    return this.fold(
      role,
      [...nodes],
      ([node]) => node,
      weight,
      (some, node) =>
        this.workerBox(
          some.flatMap(([, each]) => each),
          node ? `${node}: ${some[0][1].length} workers` : `${some.length} other machines`,
          node,
        ),
    );
  }

  workerBox(workers, name, filter = "") {
    const active = workers.reduce((all, each) => all + inUse(each), 0);
    const pages = sum(workers, "num_pages");
    const speed =
      workers[0].role === "prefill"
        ? `${bytes(sum(workers, "sent_bytes_per_s"))}/s`
        : `${rate(sum(workers, "tokens_per_s"))} tok/s`;
    return {
      name,
      stat: `${count(sum(workers, "num_running"))} running, ${speed}, ${share(active, pages)}`,
      use: pages ? active / pages : 0,
      ids: workers.map((each) => each.id),
      open: () => (workers.length === 1 ? this.open.worker(workers[0].id) : this.open.workers(filter)),
    };
  }

  /**
   * Return a box for each item; of many, for the weightiest, and one for the rest. The choice stays for a while.
   * @template Item
   * @param {string} lane
   * @param {Item[]} items
   * @param {(item: Item) => string} keyOf
   * @param {(item: Item) => number} weight
   * @param {(items: Item[], key: string) => Omit<Box, "key">} make key: "" for the rest
   * @returns {Box[]}
   */
  fold(lane, items, keyOf, weight, make) {
    const boxOf = (some, key) => ({ ...make(some, key), key: `${lane} ${key}` });
    const keys = items.length > MAX_BOXES ? this.pick(lane, items, keyOf, weight).keys : null;
    const shown = keys ? items.filter((item) => keys.has(keyOf(item))) : items;
    const rest = keys ? items.filter((item) => !keys.has(keyOf(item))) : [];
    const boxes = shown.map((item) => boxOf([item], keyOf(item)));
    boxes.sort((one, other) => compare(one.name, other.name));
    return rest.length ? [...boxes, boxOf(rest, "")] : boxes;
  }

  pick(lane, items, keyOf, weight) {
    const before = this.picked.get(lane);
    const now = performance.now();
    if (before && now - before.at < PICKED_MS) return before;
    const busiest = [...items].sort((one, other) => weight(other) - weight(one)).slice(0, MAX_BOXES - 1);
    const made = { at: now, keys: new Set(busiest.map(keyOf)) };
    this.picked.set(lane, made);
    return made;
  }

  /** Place the boxes, and make or remove those that came or went. */
  arrange() {
    if (!this.columns) return;
    const width = this.plane.clientWidth;
    const rows = Math.max(1, ...this.columns.map((column) => column.length));
    const height = HEAD + rows * (BOX_HEIGHT + BOX_GAP);
    this.plane.style.height = `${height}px`;
    const kept = new Set();
    this.columns.forEach((column, lane) => {
      const left = (width / LANES.length) * lane + LEFT;
      this.lanes[lane].style.left = `${left}px`;
      const spare = (height - HEAD - column.length * (BOX_HEIGHT + BOX_GAP)) / 2;
      column.forEach((box, row) => {
        const place = {
          x: left,
          y: HEAD + spare + row * (BOX_HEIGHT + BOX_GAP),
          width: (width / LANES.length) * BOX_SHARE,
        };
        this.places.set(box.key, place);
        kept.add(box.key);
        this.show(box, place);
      });
    });
    for (const [key, button] of this.boxes)
      if (!kept.has(key)) {
        button.remove();
        this.boxes.delete(key);
        this.places.delete(key);
      }
    this.inks = Object.fromEntries(["violet", "ground", "text"].map((name) => [name, colour(name)]));
    this.drawLines();
    this.drawFlows(performance.now());
  }

  show(box, place) {
    let button = this.boxes.get(box.key);
    if (!button) {
      button = element(
        "button",
        { type: "button" },
        element("span"),
        element("span", { class: "stat" }),
        element("span", { class: "use" }),
      );
      button.addEventListener("click", () => /** @type {any} */ (button).box.open());
      this.boxes.set(box.key, button);
      this.plane.append(button);
    }
    /** @type {any} */ (button).box = box;
    const [name, stat, use] = /** @type {any} */ (button.children);
    setText(name, box.name);
    setText(stat, box.stat);
    button.title = `${box.name}: ${box.stat}`;
    use.style.width = `${Math.round(100 * box.use)}%`;
    Object.assign(button.style, {
      left: `${place.x}px`,
      top: `${place.y}px`,
      width: `${place.width}px`,
      height: `${BOX_HEIGHT}px`,
    });
  }

  wake() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame((now) => {
      this.isWaiting = false;
      if (this.columns && now - this.drawnAt >= FRAME_MS && now > this.quietUntil) this.drawFlows(now);
      if (this.isSeen && this.flows.length && !calm.matches) this.wake();
    });
  }

  /** Draw the lines that stand still. */
  drawLines() {
    const context = fitted(this.lines, this.plane.clientWidth, this.plane.clientHeight);
    context.lineWidth = 1;
    context.strokeStyle = colour("line");
    const [gateways, routers, prefill, decode] = this.columns;
    for (const gateway of gateways) for (const router of routers) this.line(context, gateway.key, router.key);
    for (const router of routers)
      for (const box of prefill.length ? prefill : decode) this.line(context, router.key, box.key);
  }

  /** Draw the flows as they are at this time, in milliseconds. */
  drawFlows(now) {
    this.drawnAt = now;
    const lane = this.plane.clientWidth / LANES.length;
    const left = 2 * lane + LEFT + lane * BOX_SHARE;
    const width = lane * (1 - BOX_SHARE);
    Object.assign(this.stream.style, { left: `${left}px`, width: `${width}px` });
    const context = fitted(this.stream, width, this.plane.clientHeight);
    context.translate(-left, 0);
    const most = Math.max(...this.flows.map((flow) => flow.rate), 1);
    context.strokeStyle = this.inks.violet;
    context.setLineDash([7, 5]);
    context.lineDashOffset = calm.matches ? 0 : -(now / 30) % 12;
    for (const flow of this.flows) {
      context.lineWidth = 1 + 3 * Math.sqrt(flow.rate / most);
      this.line(context, flow.from, flow.to);
    }
    context.setLineDash([]);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const taken = [];
    for (const flow of this.flows.slice(0, MAX_LABELS)) this.label(context, flow, taken);
  }

  line(context, from, to) {
    const [start, end] = [this.places.get(from), this.places.get(to)];
    if (!start || !end) return;
    const [x, y] = [start.x + start.width, start.y + BOX_HEIGHT / 2];
    const [endX, endY] = [end.x, end.y + BOX_HEIGHT / 2];
    const middle = (x + endX) / 2;
    context.beginPath();
    context.moveTo(x, y);
    context.bezierCurveTo(middle, y, middle, endY, endX, endY);
    context.stroke();
  }

  /** Write a rate beside its line, unless a faster one is written there: `taken` has the heights. */
  label(context, flow, taken) {
    const [start, end] = [this.places.get(flow.from), this.places.get(flow.to)];
    if (!start || !end) return;
    const text = `${bytes(flow.rate)}/s`;
    const [x, y] = [(start.x + start.width + end.x) / 2, (start.y + end.y) / 2 + BOX_HEIGHT / 2];
    if (taken.some((height) => Math.abs(height - y) < 18)) return;
    taken.push(y);
    const width = context.measureText(text).width + 8;
    context.fillStyle = this.inks.ground;
    context.fillRect(x - width / 2, y - 8, width, 16);
    context.fillStyle = this.inks.text;
    context.fillText(text, x, y);
  }
}

/**
 * Return transfers between boxes, the fastest first.
 * @param {import("./feed.js").Worker[]} workers
 * @param {Box[]} boxes
 */
export function flowsOf(workers, boxes) {
  const boxOf = new Map(boxes.flatMap((box) => box.ids.map((id) => [id, box.key])));
  /** @type {Map<string, {from: string, to: string, rate: number}>} */
  const found = new Map();
  for (const worker of workers) {
    for (const [id, value] of Object.entries(worker.sent_to)) {
      const [from, to] = [boxOf.get(worker.id), boxOf.get(id)];
      if (!from || !to) continue;
      const key = `${from}\0${to}`;
      const flow = found.get(key) ?? { from, to, rate: 0 };
      flow.rate += value;
      found.set(key, flow);
    }
  }
  return [...found.values()].sort((one, other) => other.rate - one.rate);
}

/** Return the pages of a worker that sequences or writers hold. */
export function inUse(worker) {
  return Object.entries(worker.pages).reduce(
    (all, [state, num]) => all + (state === "free" || state === "cached" ? 0 : num),
    0,
  );
}

function busyness(worker) {
  return worker.num_running + worker.num_waiting + worker.num_incoming + worker.num_outgoing;
}

function sum(rows, field) {
  return rows.reduce((all, row) => all + row[field], 0);
}

function groupBy(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    const group = groups.get(key);
    if (group) group.push(row);
    else groups.set(key, [row]);
  }
  return groups;
}
