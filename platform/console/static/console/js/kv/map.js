/** Draws the cells: only changed ones, once per animation frame, and all of them after a change of
 * size, theme or colours. */

import { colourOf, palette } from "./colours.js";

const SMALLEST = 5;
const LARGEST = 22;
const FLASH_MS = 900;

export class CellMap {
  #canvas;
  #context;
  #cells;
  #names;
  #by;
  #side = 10;
  #columns = 1;
  #queued = false;
  #all = true;
  #flashing = new Set();
  #colours = palette();

  constructor(canvas, cells, names, by) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    this.#cells = cells;
    this.#names = names;
    this.#by = by;
    new ResizeObserver(() => this.again()).observe(canvas.parentElement);
    new MutationObserver(() => this.again()).observe(document.documentElement, { attributes: true });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
    setInterval(() => this.#by === "age" && this.again(), 2000);
  }

  get colours() {
    return this.#colours;
  }

  get columns() {
    return this.#columns;
  }

  /** Colour the cells by another attribute. */
  colourBy(by) {
    this.#by = by;
    this.again();
  }

  /** Redraw everything in the next frame. */
  again() {
    this.#all = true;
    this.draw();
  }

  /** Redraw changed cells in the next frame. */
  draw() {
    if (this.#queued) return;
    this.#queued = true;
    requestAnimationFrame(() => this.#frame());
  }

  /** The cell at a position on the page, or -1. */
  cellAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.#side);
    const row = Math.floor((event.clientY - box.top) / this.#side);
    const cell = row * this.#columns + column;
    return column >= 0 && column < this.#columns && row >= 0 && cell < this.#cells.count ? cell : -1;
  }

  #frame() {
    this.#queued = false;
    const now = performance.now();
    if (this.#all) {
      this.#fit();
      this.#colours = palette();
      for (let cell = 0; cell < this.#cells.count; cell += 1) this.#paint(cell, now);
      this.#all = false;
    } else {
      for (const cell of this.#cells.dirty) this.#paint(cell, now);
      for (const cell of this.#flashing) this.#paint(cell, now);
    }
    this.#cells.dirty.clear();
    if (this.#flashing.size) setTimeout(() => this.draw(), 100);
  }

  /** Make the cells as large as fits, aligned to device pixels. */
  #fit() {
    const width = this.#canvas.parentElement.clientWidth - 16;
    const count = Math.max(1, this.#cells.count);
    const idealSide = Math.floor(Math.sqrt((width * Math.min(520, innerHeight * 0.6)) / count));
    this.#side = Math.max(SMALLEST, Math.min(LARGEST, idealSide));
    this.#columns = Math.max(1, Math.floor(width / this.#side));
    const height = Math.ceil(count / this.#columns) * this.#side;
    const ratio = devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * ratio);
    this.#canvas.height = Math.round(height * ratio);
    this.#canvas.setAttribute("height", String(this.#canvas.height));
    this.#context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  #paint(cell, now) {
    const x = (cell % this.#columns) * this.#side;
    const y = Math.floor(cell / this.#columns) * this.#side;
    const context = this.#context;
    const inner = this.#side - 1;
    const flashes = this.#cells.evicted[cell] > 0 && now - this.#cells.evicted[cell] < FLASH_MS;
    if (flashes) this.#flashing.add(cell);
    else this.#flashing.delete(cell);
    const used = this.#cells.refs[cell] > 0;
    context.clearRect(x, y, this.#side, this.#side);
    context.fillStyle = flashes
      ? this.#colours.evicted
      : colourOf(this.#cells, cell, this.#by, this.#names, this.#colours, now);
    // Blocks that are only cached are smaller than used ones, so that colour isn't the only sign.
    const inset = used || !this.#cells.cached[cell] || flashes ? 0 : Math.max(1, this.#side * 0.22);
    context.fillRect(x + inset, y + inset, inner - 2 * inset, inner - 2 * inset);
    if (this.#cells.refs[cell] > 1) {
      context.fillStyle = this.#colours.edge;
      const dot = Math.max(2, this.#side * 0.25);
      context.fillRect(x + inner - dot, y, dot, dot);
    }
  }
}
