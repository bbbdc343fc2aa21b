/**
 * Saves the conversation on the server if the user's tenant stores conversations: at the end of an
 * answer, and some time after any other change.
 */

import { send } from "./server.js";

const SAVE_AFTER = 1200;
/** Browsers let a closed tab finish sending this many bytes in all its requests, and refuse more. */
const MAX_KEEPALIVE_BYTES = 60_000;

export class Keeper {
  #url;
  #conversation;
  #tenants;
  #tell;
  #timer = null;
  #saving = false;
  #running = false;
  #offIn = null; // a tenant that doesn't store conversations

  /** `tell(state, message)`: "saving", "kept", "off", "failed". */
  constructor(url, conversation, tenants, tell) {
    this.#url = url;
    this.#conversation = conversation;
    this.#tenants = tenants;
    this.#tell = tell;
    conversation.addEventListener("changed", () => this.#recordChange());
  }

  /** Whether the chosen tenant is known not to store conversations. */
  get off() {
    return this.#offIn !== null && this.#offIn === this.#tenants.value;
  }

  /** The conversation was opened as stored on the server. */
  opened() {
    const { saved } = this.#conversation;
    const document = this.#conversation.document();
    this.#last = { id: saved?.id, text: JSON.stringify(document), turns: document.turns.length };
  }

  /** Save a conversation restored from this tab, whose page was left before it was saved. */
  resume() {
    if (!this.#conversation.saved) this.#later();
  }

  #recordChange() {
    const running = this.#conversation.turns.some(isRunning);
    const hasFinished = this.#running && !running;
    this.#running = running;
    if (hasFinished) this.#save(); // immediately: the tab may be closed
    else this.#later();
  }

  #later() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), SAVE_AFTER);
  }

  async #save() {
    clearTimeout(this.#timer);
    const conversation = this.#conversation;
    if (this.off || conversation.empty) return;
    if (this.#saving || conversation.turns.some(isRunning)) {
      this.#later();
      return;
    }
    const document = conversation.document();
    const text = JSON.stringify(document);
    const last = conversation.saved && this.#last?.id === conversation.saved.id ? this.#last : null;
    // A colleague's conversation is only copied when the user adds to it.
    if (last?.text === text || (last?.turns === document.turns.length && !conversation.saved.own)) return;
    this.#saving = true;
    const options = { keepalive: new Blob([text]).size < MAX_KEEPALIVE_BYTES };
    try {
      const { saved } = conversation;
      const answer = saved?.own
        ? await send("PUT", `${this.#url}/${saved.id}`, { document, version: saved.version }, options)
        : await send("POST", this.#tenants.address(this.#url), { document }, options);
      if (conversation.saved === saved) conversation.saved = answer;
      this.#last = { text, id: answer.id, turns: document.turns.length };
      this.#tell("kept", answer);
    } catch (error) {
      if (error.code === "conversations_off") this.#offIn = this.#tenants.value;
      this.#tell(this.off ? "off" : "failed", error.message);
    } finally {
      this.#saving = false;
    }
  }

  #last = null;
}

function isRunning(turn) {
  return turn.state === "streaming" || turn.beside?.some(isRunning);
}
