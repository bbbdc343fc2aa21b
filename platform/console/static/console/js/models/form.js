/** The form of a model: search of its settings, and mappings that grow by a row when needed. */

import { byId } from "../lib/dom.js";
import { plural } from "../lib/format.js";

const search = byId("setting-search");
const countText = byId("setting-found");
const groups = [...document.querySelectorAll(".setting-group")];
const opened = new Map(groups.map((group) => [group, group.open]));

function narrow() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const group of groups) {
    let numFitting = 0;
    for (const setting of group.querySelectorAll(".setting")) {
      const fits = words.every((word) => setting.dataset.words.includes(word));
      setting.hidden = !fits;
      numFitting += fits ? 1 : 0;
    }
    count += numFitting;
    group.hidden = numFitting === 0;
    group.open = words.length ? numFitting > 0 : opened.get(group);
  }
  countText.hidden = words.length === 0;
  countText.textContent = count ? plural(count, "setting") : "No setting matches.";
}

search.closest(".field").hidden = false;
search.addEventListener("input", narrow);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") event.preventDefault();
});

for (const mapping of document.querySelectorAll("[data-pairs]")) {
  mapping.addEventListener("input", () => {
    const pairs = mapping.querySelectorAll(".pair");
    const last = pairs[pairs.length - 1];
    if (![...last.querySelectorAll("input")].some((field) => field.value)) return;
    const next = last.cloneNode(true);
    for (const field of next.querySelectorAll("input")) field.value = "";
    last.after(next);
  });
}

document.querySelector('[aria-invalid="true"]')?.focus();
