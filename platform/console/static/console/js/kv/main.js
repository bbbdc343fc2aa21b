/** The KV map's page. */

import { byId, el } from "../lib/dom.js";
import { Cells } from "./cells.js";
import { Names } from "./colours.js";
import { CellMap } from "./map.js";
import { proof } from "./proof.js";
import { Stream } from "./stream.js";

const SUMS_MS = 500;

function start(section) {
  const { socket, tenant, replica } = section.dataset;
  const ofTenant = tenant !== "";
  const canvas = byId("kv-cells");
  const cells = new Cells();
  const names = new Names();
  let by = ofTenant ? "request" : "tenant";
  const map = new CellMap(canvas, cells, names, by);
  let sums = 0;
  let pointed = -1;

  const show = () => {
    sums = 0;
    legend(cells, names, map.colours, by);
    tiles(cells, ofTenant);
    tenants(cells.tenants, ofTenant);
    if (pointed >= 0) tell(pointed);
  };
  const tell = (cell) => {
    pointed = cell;
    if (cell >= 0) byId("kv-cell").textContent = cells.describe(cell, { ofTenant, blockSize: cells.sums.block_size });
  };
  for (const button of section.querySelectorAll("[data-colour]")) {
    button.addEventListener("click", () => {
      by = button.dataset.colour;
      for (const choice of section.querySelectorAll("[data-colour]")) choice.setAttribute("aria-pressed", String(choice === button));
      map.colourBy(by);
      show();
    });
  }
  canvas.addEventListener("pointermove", (event) => tell(map.cellAt(event)));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: map.columns, ArrowUp: -map.columns }[event.key];
    if (step === undefined || !cells.count) return;
    event.preventDefault();
    tell(Math.max(0, Math.min(cells.count - 1, pointed + step)));
  });
  new Stream(socket, { replica, tenant }, {
    frame(frame) {
      if (cells.update(frame, performance.now())) map.again();
      else map.draw();
      section.dataset.frames = String(Number(section.dataset.frames ?? 0) + 1);
      if (!sums) sums = setTimeout(show, SUMS_MS);
    },
    state(word, live) {
      const state = byId("kv-state");
      if (state.textContent !== word) state.textContent = word;
      state.dataset.state = live ? "live" : "stale";
    },
  });
}

function swatch(colour) {
  const canvas = el("canvas", { width: 12, height: 12, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 12, 12);
  return canvas;
}

/** The legend of the colours. */
function legend(cells, names, colours, by) {
  const entries = [];
  if (by === "refs") {
    entries.push(["one sequence", colours.ramp[1]], ["two", colours.ramp[2]], ["three or more", colours.ramp[3]]);
  } else if (by === "age") {
    entries.push(["just now", colours.ramp[3]], ["15 s ago", colours.ramp[2]], ["half", colours.ramp[1]], ["longer", colours.ramp[0]]);
  } else {
    const visible = new Set();
    for (let cell = 0; cell < cells.count; cell += 1) {
      if (by === "tenant" && cells.owner[cell] && (cells.refs[cell] || cells.cached[cell])) visible.add(cells.owner[cell]);
      if (by === "request" && cells.users[cell]) visible.add(cells.users[cell][0]);
      if (by === "adapter" && (cells.refs[cell] || cells.cached[cell])) visible.add(cells.adapter[cell] || "the base model");
    }
    entries.push(...names.list(colours, visible));
  }
  entries.push(["small: kept in the cache, free to reuse", colours.kept], ["free", colours.free], ["evicted just now", colours.evicted]);
  byId("kv-legend").replaceChildren(...entries.map(([text, colour]) => el("li", {}, swatch(colour), text)));
}

function tiles(cells, ofTenant) {
  const { used, cached, shared } = cells.counts();
  const rest = cells.count - used - cached;
  const figures = [
    ["In use", used],
    ["Kept in the cache", cached],
    [ofTenant ? "Others' or empty" : "Empty", rest],
    ["Shared", shared],
    ["Evicted since opening", cells.totalEvicted],
  ];
  byId("kv-sums").replaceChildren(
    ...figures.map(([name, count]) => el("div", {}, el("dt", {}, name), el("dd", {}, count.toLocaleString("en")))),
  );
}

function tenants(usages, ofTenant) {
  const rows = usages.map((usage) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "name" }, usage.name || "–"),
      ...["used", ...(ofTenant ? [] : ["free"]), "reserved", "maximum", "running", "waiting", "states", "retained_states"].map((name) =>
        el("td", { class: "end" }, usage[name].toLocaleString("en")),
      ),
    ),
  );
  byId("kv-tenants").replaceChildren(...rows);
}

const section = byId("kv");
if (section.dataset.replica) start(section);
const form = document.getElementById("proof-form");
if (form) proof(form, byId("proof-result"));
