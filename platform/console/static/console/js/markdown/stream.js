/**
 * Markdown that grows: `write` as text arrives, `flush` once a frame, `end` when it's complete.
 *
 * The cost of a frame is that of the new text and of the open block, not of the whole answer. The
 * result doesn't depend on how the text was cut into pieces.
 */

import { BlockBuilder } from "./blocks.js";
import { HEAD, isUndecided } from "./lines.js";

export class MarkdownStream {
  #blocks;
  #buffer = "";
  #fresh = false; // something was written since the last flush
  #inLine = false; // the buffer continues a line whose head is already placed

  constructor(root) {
    this.#blocks = new BlockBuilder(root);
  }

  write(text) {
    this.#buffer += text;
    this.#fresh = true;
  }

  /** Bring the page up to date with what was written. */
  flush() {
    if (!this.#fresh) return;
    this.#fresh = false;
    this.#blocks.takeBack();
    this.#placeLines();
    this.#placeLongLine();
    if (this.#buffer && !isUndecided(this.#buffer)) this.#blocks.tryOut(this.#buffer);
    this.#blocks.leaf?.render(true);
  }

  /** The text is complete: what is still open is taken literally. */
  end() {
    this.#blocks.takeBack();
    this.#placeLines();
    this.#placeLongLine();
    if (this.#buffer) this.#blocks.line(this.#buffer, true);
    this.#buffer = "";
    this.#blocks.end();
  }

  #placeLines() {
    const lines = this.#buffer.split("\n");
    const open = lines.pop();
    for (const line of lines) this.#place(line.replace(/\r$/, ""));
    this.#buffer = open;
  }

  #place(line) {
    if (this.#inLine) {
      this.#blocks.more(line);
      this.#inLine = false;
    } else if (line.length > HEAD) {
      this.#blocks.line(line.slice(0, HEAD), false);
      this.#blocks.more(line.slice(HEAD));
    } else {
      this.#blocks.line(line, true);
    }
  }

  /** An unfinished line of any length: its head decides, the rest is added as it comes. */
  #placeLongLine() {
    if (this.#inLine) {
      this.#blocks.more(this.#buffer);
      this.#buffer = "";
    } else if (this.#buffer.length > HEAD) {
      this.#blocks.line(this.#buffer.slice(0, HEAD), false);
      this.#blocks.more(this.#buffer.slice(HEAD));
      this.#buffer = "";
      this.#inLine = true;
    }
  }
}

/** A whole text at once. */
export function renderMarkdown(root, text) {
  const stream = new MarkdownStream(root);
  stream.write(text);
  stream.end();
}
