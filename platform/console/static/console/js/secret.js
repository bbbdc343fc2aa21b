/** Pages that show a secret once: a click selects it, and a button copies it. */

import { copyFrom } from "./lib/clipboard.js";

for (const button of document.querySelectorAll("[data-copy-from]")) {
  const field = document.getElementById(button.dataset.copyFrom);
  button.addEventListener("click", () => copyFrom(button, field.value));
  field.addEventListener("focus", () => field.select());
}
