/** Handles the user's actions and updates the conversation and the page. */

import { noticeAction } from "./errors.js";

/** Upper bound of the seeds chosen here to make answers reproducible; they fit any integer type. */
const SEEDS = 2 ** 31;

export class Playground {
  #parts;
  #running = null; // {turn, columns: [{turn, view, generation}], left, stopped}

  /** `parts`: conversation, thread, generations, settings, extras, toolServers, panel, columns, tenants, composer, page. */
  constructor(parts) {
    this.#parts = parts;
  }

  /** Show the stored conversation. */
  restore() {
    const { thread, conversation } = this.#parts;
    this.#asked = null;
    thread.truncate(0);
    for (const turn of conversation.turns) thread.add(turn);
    thread.follower.toEnd();
    this.#parts.page.empty = conversation.empty;
    this.#goOn();
  }

  /** Resume the answers that were streaming when the page was left. */
  #goOn() {
    const { conversation, thread, composer } = this.#parts;
    const view = thread.views.at(-1);
    const columns = view?.views ?? [view];
    const views = columns.filter((view) => view?.turn.state === "streaming");
    if (!views.length || this.#running) return;
    const running = { turn: view.turn, left: views.length, stopped: false, columns: [] };
    this.#running = running;
    composer.busy = true;
    for (const view of views) {
      const { going } = view.turn;
      const messages = conversation.messages(conversation.turns.length - 1, columns.indexOf(view));
      thread.grow(view, () => {});
      this.#ask(running, { ...going.request, messages }, view, going);
    }
  }

  /** Ask a new question. Returns false if that isn't possible now. */
  send(text, images = []) {
    if (!this.#ready()) return false;
    this.#parts.page.hush();
    this.#add({ role: "user", text, ...(images.length && { images }) });
    this.#generate();
    return true;
  }

  /** Ask the last question again; the existing answer becomes a sibling of the new one. */
  again() {
    const { conversation } = this.#parts;
    const last = conversation.turns.length - 1;
    if (last < 0 || !this.#ready()) return;
    this.#cut(conversation.turns[last].role === "user" ? last + 1 : last);
    this.#generate();
  }

  /** Continue with the results of the calls in the last answer. */
  results() {
    if (this.#ready()) this.#generate();
  }

  /** Ask an edited question with the same images as a sibling of turn `index`, which keeps its answers. */
  edit(index, text) {
    if (!this.#ready()) return false;
    const { images } = this.#parts.conversation.turns[index];
    this.#cut(index);
    this.#add({ role: "user", text, ...(images && { images }) });
    this.#generate();
    this.#parts.composer.focus();
    return true;
  }

  /** Let the user edit their last question. */
  editLast() {
    const views = this.#parts.thread.views;
    views.findLast((view) => view.turn.role === "user")?.edit();
  }

  /** Switch to another branch. */
  choose(turn) {
    this.#abandon();
    const { conversation, thread } = this.#parts;
    const start = conversation.turns.findIndex((node) => node.parent === turn.parent);
    conversation.choose(turn);
    thread.truncate(start);
    for (const node of conversation.turns.slice(start)) thread.add(node);
    this.#changed();
    const view = thread.views[start]?.element;
    view?.querySelector(".turn-branches button:not(:disabled)")?.focus();
  }

  /** Stop the streaming answers. */
  stop() {
    if (!this.#running) return;
    this.#running.stopped = true;
    for (const { generation } of this.#running.columns) generation?.stop();
  }

  /** Start a new conversation; the old one can be restored until the next question. */
  clear() {
    const { conversation, page, thread } = this.#parts;
    if (conversation.empty) return;
    this.#abandon();
    const undo = conversation.snapshot();
    conversation.clear();
    thread.truncate(0);
    this.#changed();
    page.offerUndo("New conversation. The last one is saved.", () => {
      if (!conversation.empty) return;
      undo();
      this.restore();
    });
    this.#parts.composer.focus();
  }

  /** Buttons that help with an error. */
  errorActions(error) {
    const { settings, panel } = this.#parts;
    const actions = [noticeAction("Try again", () => this.again())];
    const name = fieldOf(error);
    if (settings.has(name)) {
      const show = () => {
        panel.show();
        settings.focus(name);
      };
      actions.unshift(noticeAction(`Change ${name}`, show));
    }
    return actions;
  }

  /** The request that would be sent now to the model of a column; null without a model. */
  request(column = 0) {
    const { conversation, settings, extras, toolServers, columns, tenants } = this.#parts;
    const model = columns.pickers[column].model;
    if (!model) return null;
    return {
      ...(tenants.value && { tenant: tenants.value }),
      model: model.id,
      messages: conversation.messages(conversation.turns.length, column),
      sampling: { seed: Math.floor(Math.random() * SEEDS), ...settings.sampling(), ...extras.sampling() },
      ...extras.request(),
      ...toolServers.request(),
    };
  }

  /** The last request, for code that repeats it. */
  lastRequest() {
    const { conversation } = this.#parts;
    if (this.#asked) return this.#asked;
    const request = conversation.empty || !this.#ready(true) ? null : this.request();
    if (!request) return null;
    const last = request.messages.findLastIndex(({ role }) => role === "user" || role === "tool");
    return { ...request, messages: request.messages.slice(0, last + 1) };
  }

  #asked = null;

  /** Whether a request can be sent; if not, focus the field that prevents it. */
  #ready(quiet = false) {
    const { settings, extras, panel, columns } = this.#parts;
    const invalid = settings.check() ?? extras.check();
    if (invalid && !quiet) {
      panel.show();
      invalid.focus();
    }
    return !invalid && Boolean(columns.pickers[0].model);
  }

  #generate() {
    this.#abandon();
    const { thread, columns } = this.#parts;
    const requests = columns.pickers.map((_, column) => this.request(column));
    const [first, ...rest] = requests;
    for (const request of rest) request.sampling.seed = first.sampling.seed;
    this.#asked = first;
    const turn = { role: "assistant", ...startedAnswer(first), ...(rest.length && { beside: rest.map(startedAnswer) }) };
    const view = this.#add(turn);
    thread.follower.toEnd();
    const views = view.views ?? [view];
    const running = { turn, left: views.length, stopped: false, columns: [] };
    this.#running = running;
    this.#parts.composer.busy = true;
    for (const [index, view] of views.entries()) this.#ask(running, requests[index], view);
  }

  #ask(running, request, view, going = null) {
    const { generations, thread } = this.#parts;
    const column = { view, turn: view.turn, generation: null };
    running.columns.push(column);
    const grew = (change) => {
      if (running !== this.#running) return;
      thread.grow(view, change);
      this.#parts.conversation.changed();
    };
    column.generation = generations.start(request, {
      start: ({ request_id: id }) => (column.turn.request = id),
      at: (id, after) => {
        const { messages, ...rest } = request; // those are in the conversation
        column.turn.going = { id, after, request: rest };
      },
      waiting: () => running === this.#running && view.waitForEngine(),
      reasoning: (text) => grew(() => view.think(text)),
      delta: (text) => grew(() => view.write(text)),
      call: ({ index, call_id: id, name }) =>
        grew(() => view.call((calls) => (calls[index] = { id, name, arguments: "" }))),
      arguments: ({ index, text }) => grew(() => view.call((calls) => (calls[index].arguments += text))),
      logprobs: (tokens) => (column.turn.logprobs ??= []).push(...tokens),
      done: (frame) => this.#end(running, column, running.stopped ? "stopped" : "done", frame, request),
      failed: (error) => {
        // An answer that can't be resumed after a reload keeps the text received.
        if (going && column.turn.going === going) this.#end(running, column, "stopped", null, request);
        else this.#end(running, column, "failed", null, request, error);
      },
    }, going);
  }

  #end(running, { turn, view }, state, frame, request, error = null) {
    if (running !== this.#running) return;
    turn.state = state;
    delete turn.going;
    if (error) {
      turn.error = error;
      this.#parts.settings.blame(fieldOf(error), error.message);
    }
    if (frame) {
      const { finish_reason, usage, ttft_ms, tokens_per_s } = frame;
      turn.stats = { finish_reason, usage, ttft_ms, tokens_per_s, seed: request.sampling.seed, request: turn.request };
    }
    this.#parts.thread.finish(view);
    running.left -= 1;
    if (running.left > 0) return;
    if (running.columns.every((column) => column.turn.state === "done") && this.#hasToolCalls(running)) {
      this.#runTools(running);
      return;
    }
    this.#running = null;
    this.#parts.composer.busy = false;
    this.#parts.page.announce(state === "failed" ? "The answer failed." : "Answer complete.");
    this.#changed();
  }

  #hasToolCalls({ columns }) {
    return columns.some(({ turn }) => turn.calls?.some(({ name }) => this.#parts.toolServers.serverOf(name)));
  }

  /** Run an answer's calls of MCP tools in turn; then continue, unless the user must enter results. */
  async #runTools(running) {
    await Promise.all(running.columns.map((column) => this.#runCalls(running, column)));
    if (running !== this.#running) return;
    this.#running = null;
    this.#parts.composer.busy = false;
    this.#changed();
    const calls = running.columns.flatMap(({ turn }) => turn.calls ?? []);
    if (!running.stopped && calls.every(({ result }) => result != null)) this.#generate();
    else this.#parts.page.announce(running.stopped ? "The tools were stopped." : "The model waits for results.");
  }

  async #runCalls(running, column) {
    const { toolServers, generations, tenants } = this.#parts;
    const { calls: view } = column.view;
    for (const call of column.turn.calls ?? []) {
      const server = toolServers.serverOf(call.name);
      if (!server || running.stopped) continue;
      call.server = server;
      view.running = call;
      view.show();
      const request = { type: "call_tool", tenant: tenants.value || undefined, function: call.name, arguments: call.arguments };
      const frame = await new Promise((resolve) => {
        const failed = ({ message }) => resolve({ text: message, is_error: true });
        column.generation = generations.start(request, { done: resolve, failed });
      });
      view.running = null;
      call.result = frame.text ?? "The user stopped this call."; // stopped before it was sent
      call.failed = frame.is_error ?? true;
      view.show();
      if (running !== this.#running) return;
      this.#parts.conversation.changed();
    }
  }

  /** Stop the requests in progress and ignore their further frames. */
  #abandon() {
    const running = this.#running;
    if (!running) return;
    this.#running = null;
    for (const { generation, turn, view } of running.columns) {
      generation?.stop();
      if (turn.state === "streaming") turn.state = "stopped";
      delete turn.going;
      this.#parts.thread.finish(view);
    }
    this.#parts.composer.busy = false;
  }

  #add(turn) {
    this.#parts.conversation.add(turn);
    const view = this.#parts.thread.add(turn);
    this.#changed();
    return view;
  }

  #cut(length) {
    this.#abandon();
    const { conversation, thread } = this.#parts;
    conversation.cut(length);
    thread.truncate(length);
    this.#changed();
  }

  #changed() {
    const { conversation, page } = this.#parts;
    page.empty = conversation.empty;
    conversation.changed();
  }
}

function startedAnswer({ model }) {
  return { text: "", model, state: "streaming" };
}

/** The setting that an error names: the last part of "sampling.max_tokens". */
function fieldOf(error) {
  return (error.param ?? "").split(".").at(-1);
}
