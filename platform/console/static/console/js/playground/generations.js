/** The requests in progress on the socket, each with its handlers; a lost connection is resumed automatically. */

const LOST = {
  type: "connection_error",
  code: "connection_lost",
  param: null,
  message: "The connection was lost before the answer was complete.",
};

/** The server closes the connection on a frame of more than 2^20 characters. */
const MAX_FRAME_CHARS = 1_000_000;
/** Milliseconds for which the server can resume an answer. */
const RESUMABLE = 60_000;
const TOO_LONG = {
  type: "invalid_request_error",
  code: "message_too_large",
  param: null,
  message: "This conversation is too long to send. Start a new one, or shorten the last message.",
};

export class Generations {
  #socket;
  #running = new Map();

  constructor(socket) {
    this.#socket = socket;
    socket.addEventListener("frame", (event) => this.#frame(event.detail));
    socket.addEventListener("down", (event) => this.#down(event.detail.code));
    socket.addEventListener("state", () => this.#state());
  }

  /**
   * Ask for an answer, or with a `type` for something else; while there's no connection the request waits for one.
   * `request`: {model, messages, sampling, ...}. `handlers`: `start(frame)`, `waiting()`, `reasoning(text)`,
   * `delta(text)`, `call(frame)`, `arguments(frame)`, `logprobs(tokens)`, `done(frame)`, `failed(error)`.
   * Exactly one of `done` and `failed` ends it. `at(id, after)`: what is shown up to here can be gone on with, also by
   * a page that was loaded anew: `going` is {id, after}.
   */
  start(request, handlers, going = null) {
    const id = going?.id ?? crypto.randomUUID?.() ?? `c${Date.now()}-${Math.random().toString(36).slice(2)}`;
    const frame = { type: "generate", id, ...request, ...(going && { after: going.after }) };
    const generation = { id, frame, handlers, sent: false, stopped: false, held: [], lostAt: 0 };
    this.#running.set(id, generation);
    if (JSON.stringify(frame).length > MAX_FRAME_CHARS) this.#end(id).failed(TOO_LONG);
    else if (this.#socket.state === "closed") this.#end(id).failed(closedError(this.#socket.reason));
    else generation.sent = this.#socket.send(frame);
    return { id, stop: () => this.#stop(generation) };
  }

  #stop(generation) {
    if (generation.stopped || !this.#running.has(generation.id)) return;
    generation.stopped = true;
    if (generation.sent) this.#socket.send({ type: "stop", id: generation.id });
    else this.#end(generation.id).done({ finish_reason: "stop" });
  }

  #end(id) {
    const generation = this.#running.get(id);
    clearTimeout(generation?.timer);
    this.#running.delete(id);
    return generation?.handlers;
  }

  #frame(frame) {
    const generation = this.#running.get(frame.id);
    if (frame.type === "error" && !generation) {
      // The error has no request id: it belongs to the last request, if any.
      const last = [...this.#running.keys()].at(-1);
      if (frame.id == null && last) this.#end(last).failed(frame.error);
      else console.warn("An error for no request of this page:", frame.error);
      return;
    }
    if (!generation) return; // a late frame of a cancelled request
    generation.held.push(frame);
    if (frame.more) return; // wait for the remaining frames of the group
    for (const frame of generation.held.splice(0)) this.#dispatch(generation, frame);
    if (!frame.at) return;
    generation.frame = { ...generation.frame, after: frame.at };
    generation.handlers.at(generation.id, frame.at);
  }

  #dispatch({ handlers }, frame) {
    const { type } = frame;
    if (type === "reasoning" || type === "delta") handlers[type](frame.text);
    else if (type === "logprobs") handlers.logprobs(frame.tokens);
    else if (["start", "waiting", "call", "arguments"].includes(type)) handlers[type](frame);
    else if (type === "done" || type === "tool_result") this.#end(frame.id).done(frame);
    else if (type === "error") this.#end(frame.id).failed(failure(frame.error));
  }

  #down(code) {
    for (const generation of [...this.#running.values()]) {
      if (!generation.sent) continue;
      generation.held = [];
      generation.sent = false;
      if (generation.stopped) this.#end(generation.id).done({ finish_reason: "stop" });
      else if (code === 4409) this.#end(generation.id).failed(TOO_LONG);
      else if (!generation.frame.after) this.#end(generation.id).failed(LOST);
      else generation.timer = setTimeout(() => this.#end(generation.id)?.failed(LOST), RESUMABLE);
    }
  }

  #state() {
    const { state, reason } = this.#socket;
    for (const generation of [...this.#running.values()]) {
      if (state === "open" && !generation.sent) {
        clearTimeout(generation.timer);
        generation.sent = this.#socket.send(generation.frame);
      }
      if (state === "closed") this.#end(generation.id).failed(closedError(reason));
    }
  }
}

/** An answer that the server can't resume was lost with its connection: report that instead. */
function failure(error) {
  return error.code === "stream_not_found" ? LOST : error;
}

function closedError(reason) {
  return { type: "connection_error", param: null, ...reason };
}
