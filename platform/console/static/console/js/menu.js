/** The account menu closes on Escape and on a press elsewhere, as menus do. */

for (const menu of document.querySelectorAll("[data-menu]")) {
  addEventListener("pointerdown", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}
