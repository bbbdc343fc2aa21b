/** The list of models: states stay live, over the shared socket; without it the page asks. */

import { percent } from "../lib/format.js";
import { Poll } from "../lib/poll.js";
import { follow, onState } from "../live/live.js";

const page = document.querySelector("[data-models]");
const known = new Map(); // of each tenant that is followed: its models

function show(models) {
  for (const model of models) {
    const row = page.querySelector(`[data-model="${CSS.escape(model.name ?? model.id)}"]`);
    if (!row) continue;
    const state = row.querySelector("[data-state-of]");
    state.dataset.state = model.state;
    const loading = model.state === "loading" && model.load_progress > 0;
    state.textContent = loading ? `loading, ${percent(model.load_progress)}` : model.state;
    const [chat, load] = ["[data-chat]", "[data-load]"].map((part) => row.querySelector(part));
    if (chat) chat.hidden = model.state !== "ready";
    if (load && model.state === "unloaded") load.hidden = false;
    else if (load && model.state !== "failed") load.hidden = true;
  }
}

/** Models that came or went need rows: the page is made anew. */
function told(tenant, { models, unknown }) {
  if (unknown) return;
  const names = models.map(({ id }) => id).sort().join("\n");
  if ((known.get(tenant) ?? names) !== names) location.reload();
  known.set(tenant, names);
  show(models);
}

if (page) {
  const loggedOut = () => location.reload();
  const asking = new Poll(page.dataset.models, 15_000, { data: (data) => show(data.models), loggedOut });
  for (const tenant of page.dataset.followed.split(" ")) {
    follow("now", tenant || null, (data) => {
      asking.stop();
      told(tenant, data);
    });
  }
  onState((state) => {
    if (state === "lost") asking.now();
    if (state === "ended") loggedOut();
  });
}
