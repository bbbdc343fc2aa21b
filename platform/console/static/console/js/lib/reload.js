/** Making a page anew, but never under the hands of whoever is at it. */

/** Whether a form was sent and its answer is on the way: a reload would take that answer's place. */
let leaving = false;
addEventListener("submit", (event) => {
  leaving = !event.defaultPrevented;
});
addEventListener("pageshow", () => {
  leaving = false;
});

/** Whether a reload would undo something: a field that is being filled in, an open fold. */
export function busy() {
  const at = document.activeElement;
  return leaving || document.querySelector("details[open]") || at?.matches("input, select, textarea");
}

/** The page anew, unless somebody is busy; the next look will tell again. */
export function reload() {
  if (!busy()) location.replace(location.href);
}
