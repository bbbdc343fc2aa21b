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
const STORED_FIELDS = ["leaf", "model", "compared", "system", "tools", "servers", "schema", "settings"];
const ANSWER_FIELDS = ["text", "images", "model", "reasoning", "thoughtFor", "state", "stats", "error", "calls", "logprobs"];

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
    const path = [];
    for (let node = this.#nodes.get(this.leaf); node; node = this.#nodes.get(node.parent)) path.push(node);
    return path.reverse();
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
    return [...this.#nodes.values()].filter((node) => node.parent === turn.parent);
  }

  /** Switch to a branch, at its last turn. */
  choose(turn) {
    let last = turn;
    const children = (id) => [...this.#nodes.values()].filter((node) => node.parent === id);
    for (let next = children(last.id).at(-1); next; next = children(last.id).at(-1)) last = next;
    this.leaf = last.id;
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
      const answer = turn.beside?.[column - 1] ?? turn;
      if (turn.role === "user") messages.push({ role: "user", content: questionContent(turn) });
      else messages.push(...answerMessages(answer));
    }
    const system = this.system.trim();
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** The document stored on the server; with `inTab`, the one stored in this tab. */
  document(inTab = false) {
    const turns = [...this.#nodes.values()].map((turn) => ({
      id: turn.id,
      parent: turn.parent,
      role: turn.role,
      ...answerFields(turn, inTab),
      ...(turn.beside && { beside: turn.beside.map((answer) => answerFields(answer, inTab)) }),
    }));
    return { turns, ...Object.fromEntries(STORED_FIELDS.map((name) => [name, this[name]])) };
  }

  /** Restore a document from the server or from this tab. */
  load(document, saved) {
    this.clear();
    for (const turn of document.turns) {
      for (const answer of [turn, ...(turn.beside ?? [])]) {
        if (answer.state === "streaming" && !answer.going) answer.state = "stopped";
        const cut = (answer.calls ?? []).filter(({ server, result }) => server && result == null);
        for (const call of cut) Object.assign(call, { result: INTERRUPTED, failed: true });
      }
      this.#nodes.set(turn.id, turn);
    }
    for (const name of STORED_FIELDS) if (document[name] !== undefined) this[name] = document[name];
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
      const stored = { version: VERSION, document: this.document(true), saved: this.saved };
      sessionStorage.setItem(this.#key, JSON.stringify(stored));
    } catch (error) {
      console.warn("The conversation can't be kept:", error);
      this.onUnsaved?.();
      this.onUnsaved = null;
    }
  }
}

function answerFields(turn, inTab) {
  const names = inTab && turn.state === "streaming" ? [...ANSWER_FIELDS, "going"] : ANSWER_FIELDS;
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
  const toolCalls = calls.map(({ id, name, arguments: json }) => ({
    id,
    type: "function",
    function: { name, arguments: json },
  }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: text || null, tool_calls: toolCalls }, ...results];
}
