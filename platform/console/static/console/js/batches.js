/** Batches: updates their progress while the page is visible. */

import { count } from "./lib/format.js";
import { reload } from "./lib/reload.js";
import { askOnNews } from "./live/ask.js";

const page = document.querySelector("[data-batches]");

function part(card, name) {
  return card.querySelector(`[data-part="${name}"]`);
}

function show(batch) {
  const card = document.querySelector(`[data-batch="${CSS.escape(batch.id)}"]`);
  if (!card) return false;
  const status = part(card, "status");
  const isChanged = status.textContent !== batch.status;
  status.textContent = batch.status;
  status.dataset.state = batch.status;
  part(card, "meter").value = batch.percent;
  part(card, "left").textContent = batch.left;
  part(card, "done").textContent = `${count(batch.completed)} of ${count(batch.total)}`;
  part(card, "failed").textContent = count(batch.failed);
  return isChanged && !batch.open;
}

if (page) {
  const tenant = new URL(page.dataset.batches, location.href).searchParams.get("tenant");
  askOnNews(page.dataset.batches, [["batches", tenant]], {
    data: ({ batches }) => {
      const anyFinished = batches.map(show).some(Boolean); // it now has files, which a reload shows
      if (anyFinished) reload();
    },
    loggedOut: () => location.reload(),
  });
}
