/** The frame of every page: times in the user's time zone, menus that close on outside clicks, and dialogs. */

import { copyFrom } from "./lib/clipboard.js";
import { moment } from "./lib/format.js";

for (const time of document.querySelectorAll("time[datetime]")) time.textContent = moment(new Date(time.dateTime));

for (const menu of document.querySelectorAll("[data-menu]")) {
  addEventListener("pointerdown", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

/* `data-opens="ID"` opens the dialog of this id, `data-close` inside one closes it. */
document.addEventListener("click", (event) => {
  const opener = event.target.closest?.("[data-opens]");
  if (opener) document.getElementById(opener.dataset.opens)?.showModal();
  if (event.target.closest?.(".dialog [data-close]")) event.target.closest("dialog").close();
});

for (const figure of document.querySelectorAll("[data-snippet]")) {
  const button = figure.querySelector("[data-copy]");
  button.addEventListener("click", () => copyFrom(button, figure.querySelector("code").textContent));
}

/* Loaded on first use, so that no page waits for it. */
let palette = null;
async function search() {
  const { Palette } = await import("./palette.js");
  palette ??= new Palette(
    document.querySelector("[data-find-url]").dataset.findUrl,
    [...document.querySelectorAll(".ways a")].map((link) => ({ kind: "Page", title: link.textContent, url: link.href })),
  );
  palette.open();
}

const searchButton = document.querySelector("[data-find-url]");
searchButton?.addEventListener("click", search);
addEventListener("keydown", (event) => {
  if (!searchButton || event.key !== "k" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  search();
});

document.querySelector(".tenant-form select")?.addEventListener("change", (event) => event.target.form.requestSubmit());

document.querySelector(".ways [aria-current]")?.scrollIntoView({ block: "nearest" });
