/** The page of settings: filtered as the user types. */

import { byId } from "./lib/dom.js";
import { plural } from "./lib/format.js";

const find = byId("find");
const onlySet = byId("only-set");

function narrow() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const group of document.querySelectorAll("[data-group]")) {
    let numVisible = 0;
    for (const row of group.querySelectorAll("tr[data-words]")) {
      const fits = words.every((word) => row.dataset.words.includes(word));
      row.hidden = !fits || (onlySet.checked && !row.dataset.set);
      numVisible += row.hidden ? 0 : 1;
    }
    group.hidden = numVisible === 0;
    count += numVisible;
  }
  byId("found").textContent = words.length || onlySet.checked ? plural(count, "setting") : "";
}

byId("narrow").hidden = false;
byId("narrow").addEventListener("submit", (event) => event.preventDefault());
find.addEventListener("input", narrow);
onlySet.addEventListener("change", narrow);
