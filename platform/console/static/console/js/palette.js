/** Search with Ctrl-K: opens a page, model, key, person, request or conversation by name or id. */

import { el } from "./lib/dom.js";

const DELAY_MS = 150;

export class Palette {
  #url;
  #pages;
  #results = [];
  #selected = 0;
  #timer = null;
  #aborter = null;

  /** `url`: of the server's search; `pages`: [{title, detail, url}] that are searched locally. */
  constructor(url, pages) {
    this.#url = url;
    this.#pages = pages;
    this.list = el("ul", { class: "palette-list", id: "palette-list", role: "listbox", "aria-label": "Results" });
    this.input = el("input", {
      class: "input",
      type: "search",
      placeholder: "Page, model, key, person, request id, conversation",
      role: "combobox",
      autocomplete: "off",
      spellcheck: false,
      "aria-label": "Search",
      "aria-expanded": "true",
      "aria-controls": "palette-list",
      on: { input: () => this.#changed(), keydown: (event) => this.#key(event) },
    });
    this.nothing = el("p", { class: "nothing", role: "status", hidden: true }, "Nothing has this name or id.");
    this.dialog = el("dialog", { class: "palette", "aria-label": "Search" }, this.input, this.list, this.nothing);
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    document.body.append(this.dialog);
  }

  open() {
    if (this.dialog.open) return;
    this.input.value = "";
    this.#show(this.#pages);
    this.dialog.showModal();
    this.input.focus();
  }

  #changed() {
    clearTimeout(this.#timer);
    this.#aborter?.abort();
    const text = this.input.value.trim();
    const pages = this.#pages.filter(({ title }) => title.toLowerCase().includes(text.toLowerCase()));
    this.#show(pages, Boolean(text));
    if (text) this.#timer = setTimeout(() => this.#ask(text, pages), DELAY_MS);
  }

  async #ask(text, pages) {
    const aborter = new AbortController();
    this.#aborter = aborter;
    try {
      const response = await fetch(`${this.#url}?q=${encodeURIComponent(text)}`, { signal: aborter.signal });
      const { results, error } = await response.json();
      if (error) throw new Error(error.message);
      this.#show([...pages, ...results]);
    } catch (error) {
      if (aborter.signal.aborted) return;
      this.nothing.textContent = `The search failed: ${error.message}`;
      this.nothing.hidden = false;
    }
  }

  #show(results, searching = false) {
    this.#results = results;
    this.list.replaceChildren(
      ...results.map(({ title, detail, kind, url }, i) =>
        el(
          "li",
          { role: "option", id: `palette-${i}`, on: { click: () => location.assign(url) } },
          el("span", {}, title),
          el("small", {}, [kind, detail].filter(Boolean).join(" · ")),
        ),
      ),
    );
    this.nothing.textContent = "Nothing has this name or id.";
    this.nothing.hidden = searching || results.length > 0;
    this.#select(0);
  }

  #select(index) {
    this.#selected = index;
    for (const [i, option] of [...this.list.children].entries()) option.setAttribute("aria-selected", String(i === index));
    const option = this.list.children[index];
    option?.scrollIntoView({ block: "nearest" });
    if (option) this.input.setAttribute("aria-activedescendant", option.id);
    else this.input.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const count = this.#results.length;
    if (move && count) {
      event.preventDefault();
      this.#select((this.#selected + move + count) % count);
    }
    if (event.key === "Enter" && count) location.assign(this.#results[this.#selected].url);
  }
}
