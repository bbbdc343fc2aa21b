/** The button of the isolation check: sends four requests and shows their results. */

import { el } from "../lib/dom.js";
import { ROOT } from "../lib/root.js";

const COLUMNS = ["Who", "Request", "Cached tokens", "First token", "Prompt computed in"];

/** Let the form run the check and show its result in `result`. */
export function proof(form, result) {
  const button = form.querySelector("button");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    result.replaceChildren(el("p", { class: "nothing" }, "Sending four requests..."));
    try {
      result.replaceChildren(...(await ask(form)));
    } catch (error) {
      result.replaceChildren(verdictText("failed", `The requests could not be made: ${error.message}`));
    } finally {
      button.disabled = false;
    }
  });
}

async function ask(form) {
  const values = Object.fromEntries(new FormData(form));
  const response = await fetch(form.dataset.address, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRFToken": values.csrfmiddlewaretoken },
    body: JSON.stringify({ tenant: values.tenant, other: values.other, model: values.model }),
  });
  const report = await response.json();
  if (!response.ok) return [verdictText("failed", report.error.message)];
  return [verdictText(report.verdict, report.conclusion), table(report.steps)];
}

function verdictText(verdict, text) {
  return el("p", { class: "proof-verdict", dataset: { verdict } }, text);
}

function table(steps) {
  const head = COLUMNS.map((name, column) => el("th", { scope: "col", class: column > 1 ? "end" : "" }, name));
  const rows = steps.map((step) =>
    el(
      "tr",
      {},
      el("td", { class: "name" }, step.who),
      el("td", { class: "name" }, el("a", { href: `${ROOT}console/requests/${step.request_id}/` }, step.request_id)),
      el("td", { class: "end" }, `${step.cached_tokens} of ${step.prompt_tokens}`),
      el("td", { class: "end" }, `${step.ttft_ms.toFixed(1)} ms`),
      el("td", { class: "end" }, `${step.prefill_ms.toFixed(1)} ms`),
    ),
  );
  const inner = el("table", { class: "figures" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", { class: "sheet-scroll", tabindex: "0", role: "group", "aria-label": "Requests of this check" }, inner);
}
