/** Polls a JSON endpoint: not while the page is hidden, and less often after failures. */

const SLOWEST = 30_000;

export class Poll {
  #url;
  #interval;
  #handlers;
  #timer = null;
  #failures = 0;
  #aborter = null;
  #stopped = false;

  /**
   * `url`: the address, or a function that gives it each time.
   * `interval`: milliseconds between answers, or a function of the last answer that gives them.
   * `handlers`: `data(json)`, `failed(message)`, `loggedOut()`.
   */
  constructor(url, interval, handlers) {
    this.#url = typeof url === "function" ? url : () => url;
    this.#interval = typeof interval === "function" ? interval : () => interval;
    this.#handlers = handlers;
    document.addEventListener("visibilitychange", () => this.#visible());
  }

  /** Request now, then periodically. */
  async now() {
    this.#stopped = false;
    clearTimeout(this.#timer);
    this.#aborter?.abort();
    const aborter = new AbortController();
    this.#aborter = aborter;
    const wait = await this.#ask(aborter.signal);
    if (aborter.signal.aborted || wait === null) return;
    if (!document.hidden) this.#timer = setTimeout(() => this.now(), wait);
  }

  /** Stop until the next `now`. */
  stop() {
    this.#stopped = true;
    clearTimeout(this.#timer);
    this.#aborter?.abort();
  }

  #visible() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#stopped) this.now();
  }

  /** Milliseconds until the next request, or null for never. */
  async #ask(signal) {
    let response;
    let data;
    try {
      response = await fetch(this.#url(), { signal, headers: { Accept: "application/json" } });
      data = response.status === 401 ? null : await response.json();
    } catch (error) {
      if (signal.aborted) return null;
      return this.#fail(response ? `The server's answer is not JSON (${error.message}).` : null);
    }
    if (response.status === 401) {
      this.#handlers.loggedOut?.();
      return null;
    }
    if (!response.ok) return this.#fail(data?.error?.message ?? `HTTP ${response.status}.`);
    this.#failures = 0;
    this.#handlers.data(data);
    return this.#interval(data);
  }

  #fail(message) {
    this.#failures += 1;
    this.#handlers.failed?.(message ?? "The server can't be reached.");
    return Math.min(SLOWEST, 1000 * 2 ** this.#failures);
  }
}
