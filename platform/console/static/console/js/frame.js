/** What every page's frame does: times in the reader's zone, menus that close as menus do, and dialogs. */

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

document.querySelector(".tenant-form select")?.addEventListener("change", (event) => event.target.form.requestSubmit());

document.querySelector(".ways [aria-current]")?.scrollIntoView({ block: "nearest" });
