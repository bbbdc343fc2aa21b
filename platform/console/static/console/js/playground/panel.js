/** A panel beside the conversation where there's room, over it where there isn't. */

export class Panel {
  #dialog;
  #button;
  #wide;
  #key;
  #onShow;

  /** `key`: remembers that it was closed. `minWidth`: from where on it stands beside the page. */
  constructor(dialog, button, { key, minWidth, onShow = () => {} }) {
    this.#dialog = dialog;
    this.#button = button;
    this.#wide = matchMedia(`(min-width: ${minWidth})`);
    this.#key = key;
    this.#onShow = onShow;
    button.addEventListener("click", () => this.toggle());
    dialog.querySelector("[data-close]").addEventListener("click", () => this.hide());
    dialog.addEventListener("close", () => this.#closed());
    // Clicking the dimmed page next to the panel closes it.
    dialog.addEventListener("click", (event) => event.target === dialog && this.hide());
    this.#wide.addEventListener("change", () => this.#fit());
    if (this.#wide.matches && remembered(key) !== "closed") this.#dock();
  }

  get open() {
    return this.#dialog.open;
  }

  toggle() {
    if (this.#dialog.open) this.hide();
    else this.show();
  }

  show() {
    if (this.#dialog.open) return;
    if (this.#wide.matches) {
      this.#dock();
      remember(this.#key, "open");
    } else {
      this.#dialog.showModal();
      this.#button.setAttribute("aria-expanded", "true");
    }
    this.#onShow();
  }

  hide() {
    if (this.#wide.matches) remember(this.#key, "closed");
    this.#dialog.close();
  }

  /** Close it if it lies over the page. */
  uncover() {
    if (this.#dialog.matches(":modal")) this.#dialog.close();
  }

  /** Beside the page it's a part of it: showing it must not take the focus, as `show()` would. */
  #dock() {
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
    if (this.#wide.matches) this.#dock();
  }
}

function remembered(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // storage is blocked: the panel starts open
  }
}

function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch (error) {
    console.warn("The panel's state can't be kept:", error);
  }
}
