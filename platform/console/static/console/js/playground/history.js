/** The list of stored conversations: search, open, move to folders, rename, share, delete. */

import { copy } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";
import { moment } from "../lib/format.js";
import { ROOT } from "../lib/root.js";
import { saveFile, toMarkdown } from "./export.js";
import { Panel } from "./panel.js";
import { send } from "./server.js";

const SEARCH_AFTER = 250;

export class History {
  #panel;
  #list;
  #folder;
  #folderNames;
  #words;
  #more;
  #url;
  #tenants;
  #handlers;
  #timer = null;
  #asked = 0;
  #acted = false;
  #tenant = ""; // whose conversations are listed

  /** `handlers`: `open(id)`, `current()` (id of the open conversation), `deleted(id)`, `changed(row)`. */
  constructor(dialog, button, url, tenants, handlers) {
    this.#url = url;
    this.#tenants = tenants;
    this.#handlers = handlers;
    this.#list = dialog.querySelector("ul");
    this.#words = dialog.querySelector("[role=status]");
    this.#more = dialog.querySelector("[data-more]");
    this.#folder = dialog.querySelector("select");
    this.#folder.addEventListener("change", () => this.#load());
    this.#folderNames = dialog.querySelector("datalist");
    this.search = dialog.querySelector("input");
    this.search.addEventListener("input", () => {
      this.#acted = false;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#load(), SEARCH_AFTER);
    });
    this.#more.addEventListener("click", () => this.#load(this.#list.lastElementChild?.dataset.id));
    const onShow = () => {
      this.#acted = false;
      this.#load();
    };
    this.#panel = new Panel(dialog, button, { key: "quire.conversations", minWidth: "100rem", onShow });
  }

  /** Reload the list if it is visible. */
  refresh() {
    if (this.#panel.open) this.#load();
  }

  async #load(cursor = "") {
    const turn = (this.#asked += 1);
    if (this.#tenants.value !== this.#tenant) this.#folder.value = ""; // folders are a tenant's
    this.#tenant = this.#tenants.value;
    const url = new URL(this.#tenants.address(this.#url), location.href);
    if (this.search.value) url.searchParams.set("q", this.search.value);
    if (cursor) url.searchParams.set("before", cursor);
    if (this.#folder.value) url.searchParams.set("folder", this.#folder.value);
    try {
      const { conversations, more, kept: storesThem, folders } = await send("GET", url.pathname + url.search);
      if (turn !== this.#asked) return; // the response to an older request
      this.#showFolders(folders);
      // A row that the user is renaming, sharing or deleting is kept while the list is reloaded.
      const busy = new Map([...this.#list.querySelectorAll("[data-busy]")].map((item) => [item.dataset.id, item]));
      const rows = conversations.map((row) => busy.get(row.id) ?? this.#row(row));
      const focused = document.activeElement;
      if (cursor) this.#list.append(...rows);
      else this.#list.replaceChildren(...rows);
      if (focused !== document.activeElement && this.#list.contains(focused)) focused.focus();
      this.#more.hidden = !more;
      const sentence = this.#sentence(this.#list.children.length, storesThem);
      if (sentence || !this.#acted) this.#words.textContent = sentence;
    } catch (error) {
      this.#words.textContent = `The conversations can't be listed: ${error.message}`;
    }
  }

  /** The selected folder stays selected even when its last conversation has been moved. */
  #showFolders(names) {
    const chosen = this.#folder.value;
    const listed = chosen && !names.includes(chosen) ? [...names, chosen] : names;
    this.#folder.parentElement.hidden = listed.length === 0;
    this.#folder.replaceChildren(el("option", { value: "" }, "All folders"), ...listed.map((name) => el("option", { value: name }, name)));
    this.#folder.value = chosen;
    this.#folderNames.replaceChildren(...names.map((name) => el("option", { value: name })));
  }

  /** Show the result of a change until the next search. */
  #say(words) {
    this.#acted = true;
    this.#words.textContent = words;
  }

  #sentence(numListed, storesThem) {
    if (!storesThem) return "This tenant keeps no conversations on the server. New ones stay in this tab.";
    if (numListed) return "";
    return this.search.value || this.#folder.value ? "Nothing found." : "No conversation yet. Your conversations will appear here.";
  }

  #row(row) {
    const open = el("button", { type: "button", class: "history-open" }, row.title);
    if (row.id === this.#handlers.current()) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      this.#panel.uncover();
      this.#handlers.open(row.id);
    });
    const when = el("time", { dateTime: row.changed_at }, moment(new Date(row.changed_at)));
    const shared = el("span", { class: "badge", dataset: { shared: "" }, hidden: !row.shared }, "shared");
    const folder = row.folder ? el("span", { class: "badge" }, row.folder) : null;
    const item = el("li", { dataset: { id: row.id } });
    const tools = [
      tool("file", `Export ${row.title} as Markdown`, () => this.#export(row)),
      tool("edit", `Rename ${row.title}`, () => this.#rename(row, item)),
      tool("folder", `Put ${row.title} into a folder`, () => this.#move(row, item)),
      tool("people", `Share ${row.title}`, () => (row.shared ? this.#share(row, item) : this.#askToShare(row, item))),
      tool("close", `Delete ${row.title}`, () => this.#delete(row, item)),
    ];
    item.append(open, el("div", { class: "history-line" }, when, folder, shared, el("div", { class: "history-tools" }, ...tools)));
    return item;
  }

  async #export(row) {
    try {
      const { document: conversation } = await send("GET", `${this.#url}/${row.id}`);
      saveFile(`${row.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.md`, toMarkdown(row.title, conversation));
    } catch (error) {
      this.#say(error.message);
    }
  }

  #rename(row, item) {
    const input = el("input", { class: "input", value: row.title, maxLength: 200, "aria-label": "Title" });
    this.#edit(row, item, input, "Rename", () => ({ title: input.value }));
  }

  #move(row, item) {
    const list = this.#folderNames.id;
    const input = el("input", { class: "input", value: row.folder, maxLength: 60, placeholder: "No folder", "aria-label": "Folder" });
    input.setAttribute("list", list);
    this.#edit(row, item, input, "Move", () => ({ folder: input.value }), () => this.refresh());
  }

  /** Replace the row with a form of one field. */
  #edit(row, item, input, verb, changes, done = () => {}) {
    const form = el("form", { class: "history-rename" }, input, el("button", { type: "submit", class: "button small" }, verb));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#change(row, changes(), (changed) => {
        item.replaceWith(this.#row(changed));
        done();
      });
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
      const badge = item.querySelector("[data-shared]"); // absent while the row is being renamed
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
      const rendered = this.#row(row);
      item.replaceWith(rendered);
      await this.#share(row, rendered);
    });
  }

  #delete(row, item) {
    const button = el("button", { type: "button", class: "button small danger" }, "Delete for good");
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

  /** Ask for confirmation in the row. */
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
