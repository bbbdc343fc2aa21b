/** The list of models: states stay live. */

import { percent } from "../lib/format.js";
import { Poll } from "../lib/poll.js";

const page = document.querySelector("[data-models]");

function show({ models }) {
  for (const model of models) {
    const row = page.querySelector(`[data-model="${model.id}"]`);
    if (!row) continue;
    const state = row.querySelector("[data-state-of]");
    state.dataset.state = model.state;
    const loading = model.state === "loading" && model.load_progress > 0;
    state.textContent = loading ? `loading, ${percent(model.load_progress)}` : model.state;
  }
  if (models.length !== page.querySelectorAll("[data-model]").length) location.reload();
}

if (page) {
  new Poll(page.dataset.models, 2000, { data: show, loggedOut: () => location.reload() }).now();
}
