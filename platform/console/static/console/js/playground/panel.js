/** The settings panel: beside the conversation where there's room, over it where there isn't. */

const WIDE = matchMedia("(min-width: 64rem)");
const KEY = "quire.panel";

export class Panel {
  #dialog;
  #button;

  constructor(dialog, button) {
    this.#dialog = dialog;
    this.#button = button;
    button.addEventListener("click", () => this.toggle());
    dialog.querySelector("[data-close]").addEventListener("click", () => this.hide());
    dialog.addEventListener("close", () => this.#closed());
    // A press on the dimmed page beside the panel closes it.
    dialog.addEventListener("click", (event) => event.target === dialog && this.hide());
    WIDE.addEventListener("change", () => this.#fit());
    if (WIDE.matches && remembered() !== "closed") this.#showBeside();
  }

  toggle() {
    if (this.#dialog.open) this.hide();
    else this.show();
  }

  show() {
    if (this.#dialog.open) return;
    if (WIDE.matches) {
      this.#showBeside();
      remember("open");
    } else {
      this.#dialog.showModal();
      this.#button.setAttribute("aria-expanded", "true");
    }
  }

  hide() {
    if (WIDE.matches) remember("closed");
    this.#dialog.close();
  }

  /** Beside the page it's a part of it: showing it must not take the focus, as `show()` would. */
  #showBeside() {
    this.#dialog.setAttribute("open", "");
    this.#button.setAttribute("aria-expanded", "true");
  }

  #closed() {
    this.#button.setAttribute("aria-expanded", "false");
    this.#button.focus();
  }

  #fit() {
    if (!this.#dialog.open) return;
    this.#dialog.close();
    if (WIDE.matches) this.#showBeside();
  }
}

function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is forbidden here: the panel starts open
  }
}

function remember(value) {
  try {
    localStorage.setItem(KEY, value);
  } catch (error) {
    console.warn("The panel's state can't be kept:", error);
  }
}
