/** Batches: updates their progress while the page is visible. */

import { count } from "./lib/format.js";
import { reload } from "./lib/reload.js";
import { askOnNews } from "./live/ask.js";

const page = document.querySelector("[data-batches]");

function part(place, name) {
  return place.querySelector(`[data-part="${name}"]`);
}

function show(batch) {
  const place = document.querySelector(`[data-batch="${CSS.escape(batch.id)}"]`);
  if (!place) return false;
  const status = part(place, "status");
  const ended = status.textContent !== batch.status;
  status.textContent = batch.status;
  status.dataset.state = batch.status;
  part(place, "meter").value = batch.percent;
  part(place, "left").textContent = batch.left;
  part(place, "done").textContent = `${count(batch.completed)} of ${count(batch.total)}`;
  part(place, "failed").textContent = count(batch.failed);
  return ended && !batch.open;
}

if (page) {
  const tenant = new URL(page.dataset.batches, location.href).searchParams.get("tenant");
  askOnNews(page.dataset.batches, [["batches", tenant]], {
    data: ({ batches }) => {
      const ended = batches.map(show).some(Boolean); // it now has files, which a reload shows
      if (ended) reload();
    },
    loggedOut: () => location.reload(),
  });
}
