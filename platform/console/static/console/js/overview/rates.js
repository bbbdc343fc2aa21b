/** Computes a replica's current rates from its running totals. */

const WINDOW = 5; // seconds
const POINTS = 60;

export class Rates {
  #samples = [];
  #incarnation = null;
  history = []; // tokens a second, oldest first

  /** Add a replica's figures; returns its output tokens per second, or NaN while unknown. */
  update(replica) {
    if (replica.incarnation !== this.#incarnation) {
      this.#incarnation = replica.incarnation; // it was restarted, which resets its totals
      this.#samples = [];
    }
    const last = this.#samples.at(-1);
    if (!last || replica.at > last.at) {
      this.#samples.push({ at: replica.at, tokens: replica.generation_tokens });
    }
    while (this.#samples.length > 2 && this.#samples[0].at < replica.at - WINDOW) {
      this.#samples.shift();
    }
    const rate = this.#rate();
    if (Number.isFinite(rate)) this.history = [...this.history, rate].slice(-POINTS);
    return rate;
  }

  #rate() {
    const [first, last] = [this.#samples[0], this.#samples.at(-1)];
    return last.at > first.at ? (last.tokens - first.tokens) / (last.at - first.at) : NaN;
  }
}
