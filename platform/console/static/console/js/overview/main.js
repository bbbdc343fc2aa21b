/** The overview page: requests figures and updates the page. */

import { byId, el } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { Poll } from "../lib/poll.js";
import { follow, onState } from "../live/live.js";
import { ReplicaCard } from "./replica_card.js";
import { modelRow, usageRow } from "./tables.js";
import { Traffic } from "./traffic.js";
import { usageChart, usageSums } from "./usage_chart.js";

const OVERVIEW_EVERY = 15_000;
const USAGE_EVERY = 60_000;

const root = byId("overview");
const { overviewUrl, usageUrl, historyUrl, loginUrl } = root.dataset;
const tenant = () => new URLSearchParams(location.search).get("tenant") ?? root.dataset.tenant;
const cards = new Map();

function showOverview({ models, replicas, failures = [] }) {
  showFailures(failures);
  const loads = showReplicas(replicas);
  const none = { running: 0, waiting: 0, speed: NaN };
  const rows = models.map((model) => modelRow(model, loads.get(model.id) ?? none));
  byId("models").replaceChildren(...rows);
  byId("no-models").hidden = models.length > 0;
  nameModel(models);
  say("live", `Live: ${plural(replicas.length, "replica")}`);
}

let listedFailures = "";

/** Failed or dead replicas, for operators only. A log shows its end and keeps the user's scroll position. */
function showFailures(failures) {
  const now = JSON.stringify(failures);
  if (now === listedFailures) return;
  listedFailures = now;
  byId("failures").hidden = failures.length === 0;
  byId("failure-cards").replaceChildren(
    ...failures.map(({ id, model, detail, log }) =>
      el(
        "article",
        { class: "card failed", "aria-label": `Failure of ${id}` },
        el("header", {}, el("h3", {}, model), el("span", { class: "state", dataset: { state: "failed" } }, id)),
        el("p", { class: "replica-detail" }, detail || "No reason was given."),
        log ? el("pre", { class: "log", tabIndex: 0, "aria-label": `The end of ${id}'s log` }, log) : null,
      ),
    ),
  );
  for (const log of byId("failure-cards").querySelectorAll(".log")) log.scrollTop = log.scrollHeight;
}

/** Update the cards; returns each model's load, summed over its replicas. */
function showReplicas(replicas) {
  const loads = new Map();
  const seen = new Set(replicas.map((replica) => replica.id));
  for (const [id, card] of cards) {
    if (!seen.has(id)) {
      card.element.remove();
      cards.delete(id);
    }
  }
  for (const replica of replicas) {
    const speed = card(replica.id).show(replica);
    const load = loads.get(replica.model) ?? { running: 0, waiting: 0, speed: NaN };
    load.running += replica.running;
    load.waiting += replica.waiting;
    if (Number.isFinite(speed)) load.speed = (Number.isFinite(load.speed) ? load.speed : 0) + speed;
    loads.set(replica.model, load);
  }
  byId("no-replicas").hidden = replicas.length > 0;
  return loads;
}

function card(id) {
  if (!cards.has(id)) {
    const created = new ReplicaCard(id);
    cards.set(id, created);
    byId("replicas").append(created.element);
  }
  return cards.get(id);
}

function showUsage({ days, daily, rows }) {
  byId("usage-sums").replaceChildren(...usageSums(daily));
  byId("usage-chart").replaceChildren(...usageChart(days, daily));
  byId("usage-picture").hidden = rows.length === 0;
  byId("usage").replaceChildren(...rows.map((row) => usageRow(days, row)));
  byId("usage-table").hidden = rows.length === 0;
  byId("no-usage").hidden = rows.length > 0;
}

/** Name an available model in the examples. */
function nameModel(models) {
  const best = models.find((model) => model.state === "ready") ?? models[0];
  if (!best) return;
  for (const span of root.querySelectorAll("[data-model-name]")) {
    if (span.textContent !== best.id) span.textContent = best.id;
  }
}

function say(state, ...words) {
  const pulse = byId("pulse");
  if (pulse.dataset.state === state && pulse.textContent === words[0]) return;
  pulse.dataset.state = state;
  pulse.replaceChildren(...words);
}

function loggedOut() {
  say("stale", "Your session has ended. ", el("a", { href: loginUrl }, "Log in again"));
}

const failed = (message) => say("stale", `Out of date: ${message}`);

/* Updates come over the socket; while it is down (a proxy, a lost connection), the page polls. */
const asking = new Poll(
  () => (tenant() ? `${overviewUrl}?tenant=${encodeURIComponent(tenant())}` : overviewUrl),
  OVERVIEW_EVERY,
  { data: showOverview, failed, loggedOut },
);
asking.now();
new Poll(usageUrl, USAGE_EVERY, { data: showUsage, failed, loggedOut }).now();

if (document.getElementById("scope")) {
  const traffic = new Traffic(historyUrl, { failed });
  traffic.now();
  follow("history", null, ({ until }) => traffic.written(until));
  let stop = null;
  const listen = () => {
    stop?.();
    stop = follow("now", tenant() || null, (data) => {
      if (data.unknown) return failed("Replicas are unknown right now.");
      asking.stop();
      showOverview(data);
    });
  };
  listen();
  byId("scope").addEventListener("change", () => setTimeout(listen));
  onState((state) => {
    if (state === "lost") asking.now();
    if (state === "ended") loggedOut();
  });
}
