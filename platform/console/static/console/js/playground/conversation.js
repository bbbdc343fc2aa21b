/**
 * The conversation: kept in memory and in this tab's sessionStorage, and nowhere else. Each reader
 * has their own key, so that the next one to log in here doesn't find it.
 *
 * A turn: {role: "user" | "assistant", text, reasoning?, thoughtFor?, model?, stats?, error?, state?}; an answer's state is
 * "streaming", "done", "stopped" or "failed".
 */

const PREFIX = "quire.playground.";
const VERSION = 1;
const SAVE_AFTER = 400;

export class Conversation {
  turns = [];
  model = "";
  system = "";
  settings = {};
  onUnsaved = null; // told once when the storage takes no more

  #key;
  #timer = null;

  constructor(reader) {
    this.#key = PREFIX + reader;
    this.#load();
    addEventListener("pagehide", () => this.#save());
  }

  /** Note that something changed. */
  changed() {
    this.#timer ??= setTimeout(() => this.#save(), SAVE_AFTER);
  }

  /** What the model is given: the system prompt, and the turns before index `end` that have text. */
  messages(end) {
    const turns = this.turns.slice(0, end).filter((turn) => turn.text);
    const messages = turns.map(({ role, text }) => ({ role, content: text }));
    const system = this.system.trim();
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  #load() {
    let data;
    try {
      data = JSON.parse(sessionStorage.getItem(this.#key) ?? "null");
    } catch (error) {
      console.warn("The conversation can't be read back:", error);
    }
    if (data?.version !== VERSION) return;
    Object.assign(this, {
      turns: data.turns,
      model: data.model,
      system: data.system,
      settings: data.settings,
    });
    for (const turn of this.turns) {
      // The page was left in the middle of it.
      if (turn.state === "streaming") turn.state = "stopped";
    }
  }

  #save() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const { turns, model, system, settings } = this;
    try {
      const text = JSON.stringify({ version: VERSION, turns, model, system, settings });
      sessionStorage.setItem(this.#key, text);
    } catch (error) {
      console.warn("The conversation can't be kept:", error);
      this.onUnsaved?.();
      this.onUnsaved = null;
    }
  }
}
