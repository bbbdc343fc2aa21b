/**
 * Renders growing Markdown: `write` as text arrives, `flush` once per frame, `end` when it's complete.
 *
 * Blocks before the last one are final: a frame parses and updates only the last block. The result
 * doesn't depend on how the text was split.
 */

import { morph } from "./morph.js";
import { described } from "./nodes.js";
import { healed, parse } from "./parser.js";

/** A frame that takes longer than this, in milliseconds, is followed by a pause `PAUSES` times as long. */
const LONG_FRAME = 4;
const PAUSES = 3;

export class MarkdownStream {
  #root;
  #text = "";
  #start = 0; // offset of the last block in the text
  #numSettled = 0; // children of the root that belong to earlier blocks
  #env = { references: Object.create(null) };
  #hasNewText = false;
  #newLine = false; // the last block may have ended
  #pausedUntil = 0;

  constructor(root) {
    this.#root = root;
  }

  write(text) {
    this.#text += text;
    this.#newLine ||= text.includes("\n");
    this.#hasNewText = true;
  }

  /** Render the text written so far. Returns false if that is postponed by some frames. */
  flush() {
    if (!this.#hasNewText) return true;
    const started = performance.now();
    if (started < this.#pausedUntil) return false;
    this.#hasNewText = false;
    if (this.#newLine) this.#settle();
    this.#newLine = false;
    const env = { references: { ...this.#env.references } };
    morph(this.#root, described(parse(healed(this.#text.slice(this.#start)), env)), this.#numSettled);
    const took = performance.now() - started;
    if (took > LONG_FRAME) this.#pausedUntil = started + took * (1 + PAUSES);
    return true;
  }

  /** Mark the text as complete: unclosed marks are then rendered literally. */
  end() {
    const tokens = parse(this.#text.slice(this.#start), this.#env);
    if (Object.keys(this.#env.references).length === 0) {
      morph(this.#root, described(tokens), this.#numSettled);
      return;
    }
    // Link definitions also apply to the text before them.
    const env = { references: this.#env.references };
    morph(this.#root, described(parse(this.#text, env)));
  }

  /** A block is final when the next one has started with a complete line. */
  #settle() {
    const open = this.#text.slice(this.#start);
    const lineEnd = open.lastIndexOf("\n") + 1;
    if (lineEnd === 0) return;
    const env = { references: { ...this.#env.references } };
    const starts = parse(open.slice(0, lineEnd), env)
      .filter((token) => token.level === 0 && token.nesting >= 0 && token.map)
      .map((token) => token.map[0]);
    if (starts.length < 2) return;
    const cut = lineStart(open, starts.at(-1));
    const nodes = described(parse(open.slice(0, cut), this.#env));
    morph(this.#root, nodes, this.#numSettled);
    this.#numSettled = this.#root.childNodes.length;
    this.#start += cut;
  }
}

function lineStart(text, line) {
  let index = 0;
  for (let count = 0; count < line; count += 1) index = text.indexOf("\n", index) + 1;
  return index;
}

/** Render a complete text. */
export function renderMarkdown(root, text) {
  const stream = new MarkdownStream(root);
  stream.write(text);
  stream.end();
}
