// Light, dark or the system's theme. A classic script in the head, so that no page flashes the wrong theme.
// The admin stores its choice under the same key, "theme": one choice applies to both.
"use strict";

(() => {
  const KEY = "theme";
  const ORDER = ["auto", "light", "dark"];

  function stored() {
    try {
      const value = localStorage.getItem(KEY);
      return ORDER.includes(value) ? value : "auto";
    } catch {
      return "auto"; // storage is blocked: the choice only lasts until the page is left
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      const label = `Theme: ${theme === "auto" ? "as the system" : theme}. Change`;
      button.setAttribute("aria-label", label);
      button.title = label;
    }
  }

  function next() {
    const current = document.documentElement.dataset.theme ?? "auto";
    const theme = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch (error) {
      console.warn("The theme can't be kept:", error);
    }
    apply(theme);
  }

  apply(stored());
  addEventListener("storage", (event) => event.key === KEY && apply(stored()));
  addEventListener("DOMContentLoaded", () => {
    apply(stored());
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.addEventListener("click", next);
    }
  });
})();
