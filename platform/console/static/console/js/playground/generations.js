/** The requests that run over the socket, each with its handlers. */

const LOST = {
  type: "connection_error",
  code: "connection_lost",
  param: null,
  message: "The connection was lost before the answer was complete.",
};

/** The server closes the connection on a frame of more than 2^20 characters. */
const MAX_FRAME_CHARS = 1_000_000;
const TOO_LONG = {
  type: "invalid_request_error",
  code: "message_too_large",
  param: null,
  message: "This conversation is too long to be sent. Clear it, or shorten the last message.",
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
   * Ask for an answer; while there's no connection the request waits for one.
   * `request`: {model, messages, sampling}. `handlers`: `start(frame)`, `reasoning(text)`, `delta(text)`,
   * `done(frame)`, `failed(error)`. Exactly one of `done` and `failed` ends it.
   */
  start(request, handlers) {
    const id = crypto.randomUUID?.() ?? `c${Date.now()}-${Math.random().toString(36).slice(2)}`;
    const frame = { type: "generate", id, ...request };
    const generation = { id, frame, handlers, sent: false, stopped: false };
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
    this.#running.delete(id);
    return generation?.handlers;
  }

  #frame(frame) {
    const generation = this.#running.get(frame.id);
    if (frame.type === "error" && !generation) {
      // The server could not tell which request it was: then it was the last one, or none.
      const last = [...this.#running.keys()].at(-1);
      if (frame.id == null && last) this.#end(last).failed(frame.error);
      else console.warn("An error for no request of this page:", frame.error);
      return;
    }
    if (!generation) return; // late words of a request that was given up
    if (frame.type === "start") generation.handlers.start(frame);
    else if (frame.type === "reasoning") generation.handlers.reasoning(frame.text);
    else if (frame.type === "delta") generation.handlers.delta(frame.text);
    else if (frame.type === "done") this.#end(frame.id).done(frame);
    else if (frame.type === "error") this.#end(frame.id).failed(frame.error);
  }

  #down(code) {
    const error = code === 4409 ? TOO_LONG : LOST;
    for (const generation of [...this.#running.values()]) {
      if (generation.sent) this.#end(generation.id).failed(error);
    }
  }

  #state() {
    const { state, reason } = this.#socket;
    for (const generation of [...this.#running.values()]) {
      if (state === "open" && !generation.sent) generation.sent = this.#socket.send(generation.frame);
      if (state === "closed") this.#end(generation.id).failed(closedError(reason));
    }
  }
}

function closedError(reason) {
  return { type: "connection_error", param: null, ...reason };
}
