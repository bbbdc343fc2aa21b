/** Which of a turn's siblings is shown, and the way to the others. */

import { el, tool } from "../lib/dom.js";

/** `actions`: `siblings(turn)`, `choose(turn)`. Nothing where there's one alone. */
export function branches(turn, actions) {
  const all = actions.siblings?.(turn) ?? [];
  const index = all.indexOf(turn);
  if (all.length < 2 || index < 0) return [];
  const step = (by, label) => {
    const button = tool("chevron", label, () => actions.choose(all[index + by]));
    button.classList.add(by < 0 ? "before" : "after");
    button.disabled = !all[index + by];
    return button;
  };
  const words = el("span", {}, `${index + 1} of ${all.length}`);
  return [step(-1, "Previous version"), words, step(1, "Next version")];
}
