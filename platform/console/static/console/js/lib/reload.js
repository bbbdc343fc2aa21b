/** Reloads a page, but not while the user is working in it. */

/** Whether a submitted form awaits its response, which a reload would cancel. */
let leaving = false;
addEventListener("submit", (event) => {
  leaving = !event.defaultPrevented;
});
addEventListener("pageshow", () => {
  leaving = false;
});

/** Whether a reload would lose something: a field being edited, an opened section. */
export function busy() {
  const focused = document.activeElement;
  return leaving || document.querySelector("details[open]") || focused?.matches("input, select, textarea");
}

/** Reload the page unless the user is busy; the next update tries again. */
export function reload() {
  if (!busy()) location.replace(location.href);
}
