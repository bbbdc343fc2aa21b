/** Stored conversations on the page: the list, the URL, and the owner of the open conversation. */

import { byId } from "../lib/dom.js";
import { History } from "./history.js";
import { Keeper } from "./keeper.js";
import { send } from "./server.js";

const NAMED = "conversation"; // in the address

export class Keeping {
  #url;
  #parts;
  #line = byId("kept");

  /** `parts`: conversation, tenants, page; `stop()`; `show()` puts a conversation on the page. */
  constructor(root, parts) {
    this.#url = root.dataset.conversationsUrl;
    this.#parts = parts;
    this.keeper = new Keeper(this.#url, parts.conversation, parts.tenants, (...change) => this.#showState(...change));
    this.history = new History(byId("history"), byId("history-toggle"), this.#url, parts.tenants, {
      open: (id) => this.#open(id),
      current: () => parts.conversation.saved?.id,
      changed: (row) => this.#changed(row),
      deleted: (id) => this.#deleted(id),
    });
    addEventListener("popstate", () => this.begin());
  }

  /** Open the conversation in the URL unless it is open already. */
  begin() {
    const id = new URLSearchParams(location.search).get(NAMED);
    if (id && id !== this.#parts.conversation.saved?.id) this.#open(id);
    else {
      this.show();
      this.keeper.resume();
    }
  }

  /** Show where the conversation is stored, and put its id into the URL. */
  show() {
    const { saved } = this.#parts.conversation;
    const url = new URL(location.href);
    if (saved) url.searchParams.set(NAMED, saved.id);
    else url.searchParams.delete(NAMED);
    if (url.href !== location.href) window.history.replaceState(null, "", url);
    document.title = saved ? `${saved.title} · Quire` : "Playground · Quire";
    if (saved && !saved.own) {
      this.#line.textContent = `Shared by ${saved.by}. If you continue it, you get your own copy.`;
    } else this.#line.textContent = this.keeper.off ? "Kept only in this tab." : "";
  }

  async #open(id) {
    const { conversation, page, stop, show } = this.#parts;
    try {
      const { document, ...saved } = await send("GET", `${this.#url}/${encodeURIComponent(id)}`);
      stop();
      conversation.load(document, saved);
      show();
      this.keeper.opened();
      this.show();
      this.history.refresh();
    } catch (error) {
      page.say(error.code === "not_found" ? "Conversation not found." : error.message);
      if (error.code === "not_found") this.show();
    }
  }

  #showState(state, message) {
    if (state === "failed") this.#line.textContent = `Not kept on the server: ${message}`;
    else this.show();
    if (state === "kept") this.history.refresh();
  }

  #changed(row) {
    const { conversation } = this.#parts;
    if (conversation.saved?.id === row.id) conversation.saved = row;
    this.show();
  }

  #deleted(id) {
    const { conversation, show } = this.#parts;
    if (conversation.saved?.id !== id) return;
    this.#parts.stop();
    conversation.clear();
    conversation.changed();
    show();
    this.show();
  }
}
