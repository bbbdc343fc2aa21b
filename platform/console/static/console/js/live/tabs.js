/** Shares a socket between a user's tabs: the tab that holds a lock has it and forwards frames to the others. */

const SAY_AGAIN_EVERY = 30_000;
const FORGET_AFTER = 150_000; // timers of hidden tabs run once a minute

export class Tabs {
  #id = Math.random().toString(36).slice(2);
  #channel = null;
  #handlers;
  #socket = null;
  #keys = [];
  #otherTabs = new Map(); // tab -> {keys, seenAt}
  #last = new Map(); // key -> the newest frame, for tabs opened later

  /** `makeSocket(handlers)` is called when this tab gets the lock. */
  constructor(reader, makeSocket, handlers) {
    this.#handlers = handlers;
    const name = `quire-live.${reader}`;
    if (!("BroadcastChannel" in globalThis) || !navigator.locks) {
      this.#lead(makeSocket);
      return;
    }
    this.#channel = new BroadcastChannel(name);
    this.#channel.addEventListener("message", ({ data }) => this.#hear(data));
    navigator.locks.request(name, () => {
      this.#lead(makeSocket);
      return new Promise(() => {}); // until the tab is closed
    });
    setInterval(() => this.#say(), SAY_AGAIN_EVERY);
  }

  /** Replace this tab's subscriptions. */
  want(keys) {
    this.#keys = keys;
    if (this.#socket) this.#join();
    else this.#say();
  }

  #lead(makeSocket) {
    this.#socket = makeSocket({
      frame: (frame) => {
        if (frame.type === "data") this.#last.set(JSON.stringify([frame.topic, frame.tenant]), frame);
        this.#pass({ kind: "frame", frame });
      },
      state: (state) => this.#pass({ kind: "state", state }),
    });
    this.#channel?.postMessage({ kind: "leader" });
    this.#join();
  }

  #pass(message) {
    this.#channel?.postMessage(message);
    this.#deliver(message);
  }

  #deliver({ kind, frame, state }) {
    if (kind === "frame") this.#handlers.frame(frame);
    else this.#handlers.state(state);
  }

  #say() {
    if (!this.#socket) this.#channel?.postMessage({ kind: "want", tab: this.#id, keys: this.#keys });
  }

  #hear(message) {
    if (message.kind === "leader") this.#say();
    else if (message.kind !== "want") this.#deliver(message);
    else if (this.#socket) {
      const oldKeys = this.#otherTabs.get(message.tab)?.keys ?? [];
      this.#otherTabs.set(message.tab, { keys: message.keys, seenAt: Date.now() });
      this.#join();
      for (const key of message.keys) {
        const frame = this.#last.get(key);
        if (frame && !oldKeys.includes(key)) this.#channel.postMessage({ kind: "frame", frame });
      }
    }
  }

  #join() {
    const all = new Set(this.#keys);
    for (const [tab, { keys, seenAt }] of this.#otherTabs) {
      if (Date.now() - seenAt > FORGET_AFTER) this.#otherTabs.delete(tab);
      else for (const key of keys) all.add(key);
    }
    for (const key of this.#last.keys()) if (!all.has(key)) this.#last.delete(key);
    this.#socket.want([...all]);
  }
}
