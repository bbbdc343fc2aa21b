/** Copies text, also on pages without the clipboard API (plain HTTP on a host other than localhost). */

import { el, icon } from "./dom.js";

/** Copy, and briefly confirm it on the button. */
export async function copyFrom(button, text) {
  if (button.dataset.saying) return;
  button.dataset.saying = "yes";
  const done = await copy(text);
  const old = [...button.childNodes];
  button.replaceChildren(icon(done ? "check" : "warning"));
  button.setAttribute("aria-live", "polite");
  button.append(el("span", { class: "visually-hidden" }, done ? "Copied" : "Copying failed"));
  setTimeout(() => {
    button.replaceChildren(...old);
    delete button.dataset.saying;
  }, 1400);
}

/** Copy the text; return whether that succeeded. */
export async function copy(text) {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      console.warn("The clipboard was refused; trying the old way:", error);
    }
  }
  return copyThroughSelection(text);
}

function copyThroughSelection(text) {
  const holder = el("textarea", { class: "visually-hidden", value: text, readOnly: true });
  const focused = document.activeElement;
  document.body.append(holder);
  holder.select();
  const done = document.execCommand("copy");
  holder.remove();
  focused?.focus();
  return done;
}
