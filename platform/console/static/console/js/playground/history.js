/** The drawer of kept conversations: found, opened, renamed, shared, deleted. */

import { copy } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";
import { moment } from "../lib/format.js";
import { ROOT } from "../lib/root.js";
import { saveFile, toMarkdown } from "./export.js";
import { send } from "./server.js";

const SEARCH_AFTER = 250;

export class History {
  #dialog;
  #list;
  #words;
  #more;
  #url;
  #tenants;
  #handlers;
  #timer = null;
  #asked = 0;
  #acted = false;

  /** `handlers`: `open(id)`, `current()` (the id that's open), `deleted(id)`, `changed(row)`, `say(text)`. */
  constructor(dialog, url, tenants, handlers) {
    this.#dialog = dialog;
    this.#url = url;
    this.#tenants = tenants;
    this.#handlers = handlers;
    this.#list = dialog.querySelector("ul");
    this.#words = dialog.querySelector("[role=status]");
    this.#more = dialog.querySelector("[data-more]");
    this.search = dialog.querySelector("input");
    this.search.addEventListener("input", () => {
      this.#acted = false;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#load(), SEARCH_AFTER);
    });
    this.#more.addEventListener("click", () => this.#load(this.#list.lastElementChild?.dataset.id));
    dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  show() {
    this.#acted = false;
    this.#dialog.showModal();
    this.#load();
  }

  async #load(before = "") {
    const turn = (this.#asked += 1);
    const url = new URL(this.#tenants.address(this.#url), location.href);
    if (this.search.value) url.searchParams.set("q", this.search.value);
    if (before) url.searchParams.set("before", before);
    try {
      const { conversations, more, kept } = await send("GET", url.pathname + url.search);
      if (turn !== this.#asked) return; // an older question's answer
      // Who renames, shares or deletes a row while the list comes anew goes on in the same row.
      const busy = new Map([...this.#list.querySelectorAll("[data-busy]")].map((item) => [item.dataset.id, item]));
      const rows = conversations.map((row) => busy.get(row.id) ?? this.#row(row));
      const focused = document.activeElement;
      if (before) this.#list.append(...rows);
      else this.#list.replaceChildren(...rows);
      if (focused !== document.activeElement && this.#list.contains(focused)) focused.focus();
      this.#more.hidden = !more;
      const sentence = this.#sentence(this.#list.children.length, kept);
      if (sentence || !this.#acted) this.#words.textContent = sentence;
    } catch (error) {
      this.#words.textContent = `The conversations can't be listed: ${error.message}`;
    }
  }

  /** What came of a change: it stands until the next search. */
  #say(words) {
    this.#acted = true;
    this.#words.textContent = words;
  }

  #sentence(found, kept) {
    if (!kept) return "This tenant keeps no conversations on the server. New ones stay in this tab.";
    if (found) return "";
    return this.search.value ? "Nothing found." : "No conversation yet. Your conversations will appear here.";
  }

  #row(row) {
    const open = el("button", { type: "button", class: "history-open" }, row.title);
    if (row.id === this.#handlers.current()) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      this.#dialog.close();
      this.#handlers.open(row.id);
    });
    const when = el("time", { dateTime: row.changed_at }, moment(new Date(row.changed_at)));
    const shared = el("span", { class: "badge", hidden: !row.shared }, "shared");
    const item = el("li", { dataset: { id: row.id } });
    const tools = [
      tool("file", `Export ${row.title} as Markdown`, () => this.#export(row)),
      tool("edit", `Rename ${row.title}`, () => this.#rename(row, item)),
      tool("people", `Share ${row.title}`, () => (row.shared ? this.#share(row, item) : this.#askToShare(row, item))),
      tool("close", `Delete ${row.title}`, () => this.#delete(row, item)),
    ];
    item.append(open, el("div", { class: "history-line" }, when, shared, el("div", { class: "history-tools" }, ...tools)));
    return item;
  }

  async #export(row) {
    try {
      const { document: kept } = await send("GET", `${this.#url}/${row.id}`);
      saveFile(`${row.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.md`, toMarkdown(row.title, kept));
    } catch (error) {
      this.#say(error.message);
    }
  }

  #rename(row, item) {
    const input = el("input", { class: "input", value: row.title, maxLength: 200, "aria-label": "Title" });
    const form = el("form", { class: "history-rename" }, input, el("button", { type: "submit", class: "button small" }, "Rename"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#change(row, { title: input.value }, (changed) => item.replaceWith(this.#row(changed)));
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      item.replaceWith(this.#row(row));
    });
    item.dataset.busy = "";
    item.replaceChildren(form);
    input.select();
  }

  async #share(row, item) {
    item.dataset.busy = "";
    await this.#change(row, { shared: !row.shared }, async (changed) => {
      Object.assign(row, changed);
      const badge = item.querySelector(".badge"); // none while the row asks for a new title
      if (badge) badge.hidden = !row.shared;
      const link = `${location.origin}${ROOT}?conversation=${row.id}`;
      const copied = row.shared && (await copy(link));
      if (!row.shared) this.#say("No longer shared: only you can open its link.");
      else if (copied) this.#say(`All members of ${row.tenant} can read it. The link was copied.`);
      else this.#say(`All members of ${row.tenant} can read it: ${link}`);
    });
    delete item.dataset.busy;
  }

  #askToShare(row, item) {
    const text = `Let all members of ${row.tenant} read "${row.title}"?`;
    this.#confirm(row, item, text, el("button", { type: "button", class: "button small" }, "Share"), async () => {
      const shown = this.#row(row);
      item.replaceWith(shown);
      await this.#share(row, shown);
    });
  }

  #delete(row, item) {
    const button = el("button", { type: "button", class: "button small danger" }, "Delete it for good");
    this.#confirm(row, item, row.title, button, async () => {
      try {
        await send("DELETE", `${this.#url}/${row.id}`);
        item.remove();
        this.#handlers.deleted(row.id);
      } catch (error) {
        this.#say(error.message);
      }
    });
  }

  /** The row asks before it acts. */
  #confirm(row, item, text, button, action) {
    const cancel = el("button", { type: "button", class: "button quiet small" }, "Cancel");
    cancel.addEventListener("click", () => item.replaceWith(this.#row(row)));
    button.addEventListener("click", action);
    item.dataset.busy = "";
    item.replaceChildren(el("p", {}, text), el("div", { class: "history-line" }, button, cancel));
    button.focus();
  }

  async #change(row, changes, done) {
    try {
      const changed = await send("PATCH", `${this.#url}/${row.id}`, changes);
      this.#handlers.changed(changed);
      await done(changed);
    } catch (error) {
      this.#say(error.message);
    }
  }
}
