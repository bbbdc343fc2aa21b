/** The models of a playground's page beside chat. */

import { el } from "../lib/dom.js";
import { send } from "./server.js";

/** Fill the `model` select of a page's form from the form's address of models; `onReady(mayRun)` once it is known. */
export async function listModels(form, say, onReady) {
  const { model } = form.elements;
  try {
    const { models, view_only: viewOnly } = await send("GET", form.dataset.modelsUrl);
    const option = ({ id, state }) => el("option", { value: id, disabled: state !== "ready" }, state === "ready" ? id : `${id} (${state})`);
    model.replaceChildren(...models.map(option));
    const ready = models.find((candidate) => candidate.state === "ready");
    if (ready) model.value = ready.id;
    else model.replaceChildren(el("option", { value: "" }, models.length ? "No model is ready" : "No model for this"), ...models.map(option));
    model.disabled = models.length === 0;
    if (viewOnly) say("Viewers can't run models. An admin of your tenant can give you the role member.");
    onReady(Boolean(ready) && !viewOnly);
  } catch (error) {
    say(`The models can't be listed: ${error.message}`);
  }
}
