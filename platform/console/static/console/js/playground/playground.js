/** What the reader does, and what then happens to the conversation and the page. */

import { noticeAction } from "./errors.js";

export class Playground {
  #parts;
  #running = null; // {generation, turn, view, stopped}

  /** `parts`: conversation, thread, generations, settings, panel, picker, tenants, composer, page. */
  constructor(parts) {
    this.#parts = parts;
  }

  /** Put what was kept back on the page. */
  restore() {
    const { conversation, thread } = this.#parts;
    for (const turn of conversation.turns) thread.add(turn);
    thread.follower.toEnd();
    this.#changed();
  }

  /** Ask something new. False if it can't be asked as things stand. */
  send(text) {
    if (!this.#ready()) return false;
    this.#parts.page.hush();
    this.#add({ role: "user", text });
    this.#generate();
    return true;
  }

  /** Ask the last question again. */
  again() {
    const { conversation } = this.#parts;
    const last = conversation.turns.findLastIndex((turn) => turn.role === "user");
    if (last < 0 || !this.#ready()) return;
    this.#cut(last + 1);
    this.#generate();
  }

  /** Put another question in the place of turn `index`; what followed it goes. */
  edit(index, text) {
    if (!this.#ready()) return false;
    this.#cut(index);
    this.#add({ role: "user", text });
    this.#generate();
    this.#parts.composer.focus();
    return true;
  }

  /** Let the reader change their last question. */
  editLast() {
    const views = this.#parts.thread.views;
    views.findLast((view) => view.turn.role === "user")?.edit();
  }

  /** Stop the answer that is being written. */
  stop() {
    if (!this.#running) return;
    this.#running.stopped = true;
    this.#running.generation.stop();
  }

  /** An empty page; the old one can be brought back as long as nothing new was asked. */
  clear() {
    const { conversation, page } = this.#parts;
    if (conversation.turns.length === 0) return;
    this.#abandon();
    const old = conversation.turns;
    this.#cut(0);
    page.offerUndo("Conversation cleared.", () => {
      if (conversation.turns.length > 0) return;
      for (const turn of old) this.#add(turn);
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

  /** Whether a request can be made; if not, the reader is put at what is in the way. */
  #ready() {
    const { settings, panel, picker } = this.#parts;
    const wrong = settings.check();
    if (wrong) {
      panel.show();
      wrong.focus();
      return false;
    }
    return Boolean(picker.model);
  }

  #generate() {
    this.#abandon();
    const { conversation, thread, generations, settings, picker, tenants } = this.#parts;
    const request = {
      ...(tenants.value && { tenant: tenants.value }),
      model: picker.model.id,
      messages: conversation.messages(conversation.turns.length),
      sampling: settings.sampling(),
    };
    const turn = { role: "assistant", text: "", model: request.model, state: "streaming" };
    const view = this.#add(turn);
    thread.follower.toEnd();
    this.#running = { turn, view, generation: null, stopped: false };
    this.#parts.composer.busy = true;
    const mine = this.#running;
    mine.generation = generations.start(request, {
      start: () => {},
      reasoning: (text) => this.#grew(mine, () => thread.think(view, text)),
      delta: (text) => this.#grew(mine, () => thread.write(view, text)),
      done: (frame) => this.#end(mine, mine.stopped ? "stopped" : "done", frame),
      failed: (error) => this.#end(mine, "failed", null, error),
    });
  }

  #grew(running, show) {
    if (running !== this.#running) return;
    show();
    this.#parts.conversation.changed();
  }

  #end(running, state, frame, error = null) {
    if (running !== this.#running) return;
    this.#running = null;
    const { turn, view } = running;
    turn.state = state;
    if (error) {
      turn.error = error;
      this.#parts.settings.blame(fieldOf(error), error.message);
    }
    if (frame) {
      const { finish_reason, usage, ttft_ms, tokens_per_s } = frame;
      turn.stats = { finish_reason, usage, ttft_ms, tokens_per_s };
    }
    this.#parts.thread.finish(view);
    this.#parts.composer.busy = false;
    this.#parts.page.announce(state === "failed" ? "The answer failed." : "Answer complete.");
    this.#changed();
  }

  /** Stop what runs, and take no more notice of it. */
  #abandon() {
    const running = this.#running;
    if (!running) return;
    this.#running = null;
    running.generation.stop();
    running.turn.state = "stopped";
    this.#parts.thread.finish(running.view);
    this.#parts.composer.busy = false;
  }

  #add(turn) {
    this.#parts.conversation.turns.push(turn);
    const view = this.#parts.thread.add(turn);
    this.#changed();
    return view;
  }

  #cut(length) {
    this.#abandon();
    const { conversation, thread } = this.#parts;
    conversation.turns = conversation.turns.slice(0, length);
    thread.truncate(length);
    this.#changed();
  }

  #changed() {
    const { conversation, page } = this.#parts;
    page.empty = conversation.turns.length === 0;
    conversation.changed();
  }
}

/** The setting that an error is about: the last part of "sampling.max_tokens". */
function fieldOf(error) {
  return (error.param ?? "").split(".").at(-1);
}
