/**
 * The conversation as a tree: each turn follows another one, and an edited question or a second
 * answer becomes its sibling. The page shows the path from a first turn to the chosen leaf.
 *
 * It is stored in this tab's sessionStorage under a key of the user, so that it survives a reload,
 * and on the server by `keeper.js` if the tenant stores conversations.
 *
 * A turn: {id, parent, role: "user" | "assistant", text, images?: [{id, name, kind?}], model?, reasoning?,
 * thoughtFor?, stats?, error?, state?, calls?, logprobs?, beside?, going?}; a call: {id, name, arguments, result?,
 * server?, failed?}; `beside` lists other models' answers to the same question. An answer's state is
 * "streaming", "done", "stopped" or "failed". While it streams, `going` is {id, after, request}, with which this
 * tab resumes it after a reload.
 */

const PREFIX = "quire.playground.";
const VERSION = 3;
const SAVE_AFTER = 400;
const INTERRUPTED = "Interrupted: the page was closed or loaded again while this tool ran.";
const KEPT = ["leaf", "model", "compared", "system", "tools", "servers", "schema", "settings"];
const SAID = ["text", "images", "model", "reasoning", "thoughtFor", "state", "stats", "error", "calls", "logprobs"];

export class Conversation extends EventTarget {
  #nodes = new Map();
  leaf = null;
  model = "";
  compared = []; // ids of the models that answer beside it
  system = "";
  tools = "";
  servers = []; // names of MCP servers whose tools are offered
  schema = "";
  settings = {};
  saved = null; // {id, version, title, tenant, own, shared} of the copy on the server
  onUnsaved = null; // called once when the storage is full

  #key;
  #timer = null;

  constructor(reader) {
    super();
    this.#key = PREFIX + reader;
    this.#restore();
    addEventListener("pagehide", () => this.#save());
  }

  /** The turns on the path to the leaf. */
  get turns() {
    const found = [];
    for (let at = this.#nodes.get(this.leaf); at; at = this.#nodes.get(at.parent)) found.push(at);
    return found.reverse();
  }

  get empty() {
    return this.#nodes.size === 0;
  }

  /** Append a turn to the leaf. */
  add(turn) {
    const id = `t${this.#nodes.size + 1}-${Math.random().toString(36).slice(2, 8)}`;
    Object.assign(turn, { id, parent: this.leaf });
    this.#nodes.set(id, turn);
    this.leaf = id;
  }

  /** Go back to the first `length` turns; the others remain as a branch. */
  cut(length) {
    this.leaf = this.turns[length - 1]?.id ?? null;
  }

  /** The turns with the same parent as this one, including itself. */
  siblings(turn) {
    return [...this.#nodes.values()].filter((each) => each.parent === turn.parent);
  }

  /** Switch to a branch, at its last turn. */
  choose(turn) {
    let at = turn;
    const children = (id) => [...this.#nodes.values()].filter((each) => each.parent === id);
    for (let next = children(at.id).at(-1); next; next = children(at.id).at(-1)) at = next;
    this.leaf = at.id;
  }

  /** Discard everything except the settings. */
  clear() {
    this.#nodes = new Map();
    this.leaf = null;
    this.saved = null;
  }

  /** Return a function that restores the conversation after `clear`. */
  snapshot() {
    const [nodes, leaf, saved] = [this.#nodes, this.leaf, this.saved];
    return () => {
      [this.#nodes, this.leaf, this.saved] = [nodes, leaf, saved];
      this.changed();
    };
  }

  /** Notify listeners of a change, and store the conversation soon. */
  changed() {
    this.#timer ??= setTimeout(() => this.#save(), SAVE_AFTER);
    this.dispatchEvent(new Event("changed"));
  }

  /**
   * The messages for the model: the system prompt, and the turns with content before index `end`.
   * `column`: whose model's answers to include.
   */
  messages(end, column = 0) {
    const messages = [];
    for (const turn of this.turns.slice(0, end)) {
      const said = turn.beside?.[column - 1] ?? turn;
      if (turn.role === "user") messages.push({ role: "user", content: questionContent(turn) });
      else messages.push(...answerMessages(said));
    }
    const system = this.system.trim();
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** The document stored on the server; with `here`, the one stored in this tab. */
  document(here = false) {
    const turns = [...this.#nodes.values()].map((turn) => ({
      id: turn.id,
      parent: turn.parent,
      role: turn.role,
      ...said(turn, here),
      ...(turn.beside && { beside: turn.beside.map((answer) => said(answer, here)) }),
    }));
    return { turns, ...Object.fromEntries(KEPT.map((name) => [name, this[name]])) };
  }

  /** Restore a document from the server or from this tab. */
  load(document, saved) {
    this.clear();
    for (const turn of document.turns) {
      for (const each of [turn, ...(turn.beside ?? [])]) {
        if (each.state === "streaming" && !each.going) each.state = "stopped";
        const cut = (each.calls ?? []).filter(({ server, result }) => server && result == null);
        for (const call of cut) Object.assign(call, { result: INTERRUPTED, failed: true });
      }
      this.#nodes.set(turn.id, turn);
    }
    for (const name of KEPT) if (document[name] !== undefined) this[name] = document[name];
    this.leaf = document.leaf ?? null;
    this.saved = saved;
  }

  #restore() {
    try {
      const data = JSON.parse(sessionStorage.getItem(this.#key) ?? "null");
      if (data?.version === VERSION) this.load(data.document, data.saved);
    } catch (error) {
      console.warn("The conversation can't be read back:", error);
    }
  }

  #save() {
    clearTimeout(this.#timer);
    this.#timer = null;
    try {
      const kept = { version: VERSION, document: this.document(true), saved: this.saved };
      sessionStorage.setItem(this.#key, JSON.stringify(kept));
    } catch (error) {
      console.warn("The conversation can't be kept:", error);
      this.onUnsaved?.();
      this.onUnsaved = null;
    }
  }
}

function said(turn, here) {
  const names = here && turn.state === "streaming" ? [...SAID, "going"] : SAID;
  return Object.fromEntries(names.filter((name) => turn[name] != null).map((name) => [name, turn[name]]));
}

function questionContent({ text, images }) {
  if (!images?.length) return text;
  const parts = images.map(({ id, name, kind }) =>
    kind === "document" ? { type: "file", file: { file_id: id, filename: name } } : { type: "image_url", file_id: id },
  );
  return text ? [...parts, { type: "text", text }] : parts;
}

function answerMessages({ text, calls }) {
  if (!calls?.length) return text ? [{ role: "assistant", content: text }] : [];
  const made = calls.map(({ id, name, arguments: json }) => ({
    id,
    type: "function",
    function: { name, arguments: json },
  }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: text || null, tool_calls: made }, ...results];
}
