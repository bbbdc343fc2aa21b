/** The blocks sent by the server, as arrays indexed by cell, so that ten thousand are cheap to draw. */

export class Cells {
  constructor() {
    this.clear(0);
  }

  /** Reset to this number of cells. */
  clear(count) {
    this.count = count;
    this.refs = new Uint16Array(count);
    this.cached = new Uint8Array(count);
    this.changed = new Float64Array(count);
    this.evicted = new Float64Array(count);
    this.owner = new Array(count).fill("");
    this.users = new Array(count).fill(null);
    this.adapter = new Array(count).fill("");
    this.tier = new Array(count).fill("");
    this.media = new Array(count).fill("");
    this.dirty = new Set();
    this.sums = {};
    this.tenants = [];
    this.totalEvicted = 0;
  }

  /** Apply a frame of the socket. Returns whether all cells must be redrawn. */
  update(frame, now) {
    const isComplete = Boolean(frame.whole) || frame.num_cells !== this.count;
    if (isComplete) {
      const evicted = this.totalEvicted;
      this.clear(frame.num_cells);
      this.totalEvicted = evicted;
    }
    for (const cell of frame.gone ?? []) this.#empty(cell, now);
    for (const [cell, refs, cached, owner, users, adapter, tier, media] of frame.blocks) {
      if (cell >= this.count) continue;
      const other = this.owner[cell] && this.owner[cell] !== frame.words[owner];
      if (!isComplete && this.cached[cell] && (!cached || other)) this.evicted[cell] = now;
      this.refs[cell] = refs;
      this.cached[cell] = cached;
      this.owner[cell] = frame.words[owner];
      this.users[cell] = users.length ? users.map((user) => frame.words[user]) : null;
      this.adapter[cell] = frame.words[adapter];
      this.tier[cell] = frame.words[tier];
      this.media[cell] = frame.words[media];
      this.changed[cell] = now;
      this.dirty.add(cell);
    }
    this.totalEvicted += frame.evicted ?? 0;
    this.sums = frame;
    this.tenants = frame.tenants;
    return isComplete;
  }

  #empty(cell, now) {
    this.evicted[cell] = now;
    this.refs[cell] = this.cached[cell] = 0;
    this.owner[cell] = this.adapter[cell] = this.tier[cell] = this.media[cell] = "";
    this.users[cell] = null;
    this.changed[cell] = now;
    this.dirty.add(cell);
  }

  /** Describe a cell. */
  describe(cell, { ofTenant, blockSize }) {
    const state = this.refs[cell] ? "in use" : this.cached[cell] ? "kept in the cache, free to reuse" : "free";
    if (ofTenant && !this.owner[cell]) return `Block ${cell}: not yours; its content isn't shown`;
    const parts = [`Block ${cell} of ${blockSize} tokens: ${state}`];
    if (this.owner[cell]) parts.push(`of ${this.owner[cell]}`);
    if (this.refs[cell] > 1) parts.push(`shared by ${this.refs[cell]} sequences`);
    if (this.users[cell]) parts.push(`used by ${this.users[cell].join(", ")}`);
    if (this.refs[cell] && this.cached[cell]) parts.push("findable as a cached prefix");
    if (this.media[cell]) parts.push(`holds ${this.media[cell]}`);
    if (this.adapter[cell]) parts.push(`computed with ${this.adapter[cell]}`);
    if (this.tier[cell]) parts.push(`saved in the ${this.tier[cell]} tier`);
    return parts.join("; ");
  }

  /** Count the cells in each state. */
  counts() {
    let used = 0;
    let cached = 0;
    let shared = 0;
    for (let cell = 0; cell < this.count; cell += 1) {
      if (this.refs[cell]) used += 1;
      else if (this.cached[cell]) cached += 1;
      if (this.refs[cell] > 1) shared += 1;
    }
    return { used, cached, shared };
  }
}
