/** The pages of adapters: live states, and uploads. */

import { byId, el } from "../lib/dom.js";
import { size } from "../lib/format.js";
import { reload } from "../lib/reload.js";
import { askOnNews } from "../live/ask.js";
import { UploadForm } from "./form.js";

const page = document.querySelector("[data-adapters]");
const form = document.getElementById("upload");
const upload = form ? new UploadForm(form) : null;

function signatureOf({ versions }) {
  const numbers = Object.keys(versions).sort((a, b) => a - b);
  return numbers.map((number) => `${number}:${versions[number]}`).join(",");
}

function show(adapters) {
  let stale = false;
  for (const adapter of adapters) {
    for (const entry of document.querySelectorAll(`[data-adapter="${adapter.id}"]`)) {
      stale ||= entry.dataset.signature !== signatureOf(adapter);
      const cell = entry.querySelector("[data-lies]");
      if (cell) showTiers(cell, adapter);
    }
    const lying = document.querySelector(`[data-lying="${adapter.id}"]`);
    if (lying) showSpots(lying, adapter);
  }
  stale ||= document.getElementById("list-title") !== null && adapters.length !== rows();
  if (stale && !upload?.busy) reload();
}

const rows = () => page.querySelectorAll("tr[data-adapter]").length;

const tier = (name) => el("span", { class: "tier", dataset: { tier: name } }, name);

function showTiers(cell, { residency }) {
  const spots = Object.values(residency).flat();
  cell.replaceChildren(...(spots.length ? spots.map((spot) => tier(spot.tier)) : ["–"]));
}

/** The texts are those of `templates/console/adapter.html`. */
function spotText({ version, replica, bytes, running, waiting, pinned }) {
  const where = `version ${version} on ${replica}: ${size(bytes)}`;
  return ` ${where}, ${running} running, ${waiting} waiting${pinned ? ", pinned" : ""}`;
}

function showSpots(entry, { residency }) {
  const spots = Object.values(residency).flat();
  entry.replaceChildren(
    ...spots.map((spot) => el("p", { class: "spot" }, tier(spot.tier), spotText(spot))),
  );
}

if (page) {
  const url = new URL(page.dataset.adapters, location.href);
  askOnNews(url.href, [["adapters", url.searchParams.get("tenant")]], {
    data: ({ adapters }) => show(adapters),
    loggedOut: () => location.reload(),
  });
}

const promoting = document.querySelector("[data-promote]");
if (promoting) {
  const share = byId("promote-share");
  const say = () => {
    byId("promote-said").textContent = `${share.value} %`;
    const isFull = share.value === "100";
    promoting.querySelector("button").textContent = isFull ? "Promote" : "Start the canary";
  };
  share.addEventListener("input", say);
  say();
}
