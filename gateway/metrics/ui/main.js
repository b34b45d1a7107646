/** The page: it takes a snapshot a second and hands it to its parts. */
import { Chart } from "./chart.js";
import { ClusterMap } from "./cluster_map.js";
import { Details, showFields, showTenant, showWorker } from "./details.js";
import { byId, element, setText, Values } from "./dom.js";
import { Feed } from "./feed.js";
import { seconds } from "./format.js";
import { RequestList } from "./requests.js";
import { Table } from "./table.js";
import { showRequest } from "./timeline.js";
import { CHARTS, GATEWAY_COLUMNS, PLAN_COLUMNS, ROUTER_COLUMNS, TENANT_COLUMNS, tiles, WORKER_COLUMNS } from "./views.js";

/** @type {import("./feed.js").Snapshot|null} */
let latest = null;
const details = new Details();
const values = new Values(byId("tiles"));
const charts = CHARTS.map((each) => new Chart(byId("charts"), each.title, each.series, each.format, each));
const lists = {
  workers: rows("Workers", WORKER_COLUMNS, ({ id }) => openWorker(id)),
  tenants: rows("Tenants", TENANT_COLUMNS, (row) => showTenant(details, latest, row.status.tenant)),
  requests: list("Requests", (host) => new RequestList(host, openRequest)),
  gateways: rows("Gateways", GATEWAY_COLUMNS, ({ name }) => openRow("gateways", "name", name, `Gateway ${name}`)),
  routers: rows("Routers", ROUTER_COLUMNS, ({ id }) => openRow("routers", "id", id, `Router ${id.slice(0, 8)}`)),
  plans: rows("Plans", PLAN_COLUMNS, ({ id }) => openRow("plans", "id", id, `Plan ${id}`)),
};
const map = new ClusterMap(byId("map"), {
  worker: openWorker,
  workers: (filter) => {
    choose("workers");
    lists.workers.part.filter.value = filter;
    lists.workers.part.filter.dispatchEvent(new Event("input"));
    byId("lists").scrollIntoView();
  },
  list: (name) => {
    choose(name);
    byId("lists").scrollIntoView();
  },
});

function list(title, make) {
  const name = title.toLowerCase();
  const tab = element(
    "button",
    { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` },
    title,
  );
  const panel = element("div", {
    role: "tabpanel",
    id: `panel-${name}`,
    "aria-labelledby": `tab-${name}`,
    hidden: "",
  });
  byId("tabs").append(tab);
  byId("panels").append(panel);
  tab.addEventListener("click", () => choose(name));
  return { tab, panel, part: make(panel) };
}

function rows(title, columns, open) {
  return list(title, (host) => new Table(host, title, columns, open));
}

function choose(name) {
  for (const [each, { tab, panel }] of Object.entries(lists)) {
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    panel.hidden = each !== name;
  }
  if (latest) updateList(name);
}

function chosen() {
  return Object.keys(lists).find((name) => !lists[name].panel.hidden) ?? "workers";
}

function updateList(name) {
  lists[name].part.update(latest[name]); // requests are not in a snapshot: their list asks for them
}

function openWorker(id) {
  if (latest) showWorker(details, latest, id);
}

function openRequest(id) {
  if (latest) showRequest(details, latest, id);
}

/** Show every field of the row of a list that has this value. */
function openRow(list, field, value, title) {
  showFields(details, latest, title, (snapshot) => snapshot[list].find((each) => each[field] === value));
}

function tell(points, snapshot) {
  latest = snapshot;
  document.title = `Baton: ${snapshot.model}`;
  setText(byId("model"), snapshot.model);
  setText(byId("version"), `Baton ${snapshot.version}`);
  values.update(tiles(snapshot));
  warn(snapshot);
  inTurns([
    () => updateList(chosen()),
    () => details.refresh?.(snapshot),
    () => map.update(snapshot),
    ...charts.map((chart) => () => chart.update(points)),
  ]);
}

/** Do one part a frame, so that no frame is late. */
function inTurns([first, ...rest]) {
  if (document.hidden) return;
  requestAnimationFrame(() => {
    first();
    if (rest.length) inTurns(rest);
  });
}

function warn({ head_away_s, left_out, workers }) {
  const said = [];
  if (!workers.length) said.push("No workers are known yet.");
  if (head_away_s)
    said.push(`Ray's head has not answered for ${seconds(head_away_s)}: no worker can be started.`);
  for (const [name, num] of Object.entries(left_out))
    said.push(`${num} ${name} are left out: the status has no room for them.`);
  byId("alarm").hidden = !said.length;
  setText(byId("alarm"), said.join(" "));
}

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("baton-theme", theme);
  setText(byId("theme"), `Theme: ${theme}`);
  for (const chart of charts) chart.draw();
  map.arrange();
}

byId("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("baton-theme") ?? "auto") + 1) % THEMES.length]);
});

byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(lists);
  const next = names[(names.indexOf(chosen()) + step + names.length) % names.length];
  choose(next);
  lists[next].tab.focus();
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "Escape" && details.isOpen) details.close();
  else if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "/") {
    event.preventDefault();
    lists[chosen()].part.filter.focus();
  } else if (Object.keys(lists)[Number(event.key) - 1]) choose(Object.keys(lists)[Number(event.key) - 1]);
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  setTheme(localStorage.getItem("baton-theme") ?? "auto"),
);
choose("workers");
setTheme(localStorage.getItem("baton-theme") ?? "auto");
new Feed(tell, (isLive) => {
  setText(byId("state"), isLive ? "live" : "the connection is lost; connecting again");
  byId("state").toggleAttribute("data-live", isLive);
}).open();
