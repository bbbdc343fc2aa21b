/**
 * Markdown that grows: `write` as text arrives, `flush` once a frame, `end` when it's complete.
 *
 * Blocks before the last are settled: a frame parses and touches the last one alone. The result
 * doesn't depend on how the text was cut into pieces.
 */

import { morph } from "./morph.js";
import { described } from "./nodes.js";
import { healed, parse } from "./parser.js";

/** A frame that took longer than this is followed by a pause of several times as much. */
const LONG_FRAME = 4;
const PAUSES = 3;

export class MarkdownStream {
  #root;
  #text = "";
  #start = 0; // where the last block begins in the text
  #kept = 0; // children of the root that belong to what is before it
  #env = { references: Object.create(null) };
  #fresh = false;
  #newLine = false; // the last block may have ended
  #notBefore = 0;

  constructor(root) {
    this.#root = root;
  }

  write(text) {
    this.#text += text;
    this.#newLine ||= text.includes("\n");
    this.#fresh = true;
  }

  /** Bring the page up to date with what was written. False: it's put off for some frames. */
  flush() {
    if (!this.#fresh) return true;
    const begun = performance.now();
    if (begun < this.#notBefore) return false;
    this.#fresh = false;
    if (this.#newLine) this.#settle();
    this.#newLine = false;
    const env = { references: { ...this.#env.references } };
    morph(this.#root, described(parse(healed(this.#text.slice(this.#start)), env)), this.#kept);
    const took = performance.now() - begun;
    if (took > LONG_FRAME) this.#notBefore = begun + took * (1 + PAUSES);
    return true;
  }

  /** The text is complete: what is still open is taken literally. */
  end() {
    const tokens = parse(this.#text.slice(this.#start), this.#env);
    if (Object.keys(this.#env.references).length === 0) {
      morph(this.#root, described(tokens), this.#kept);
      return;
    }
    // Definitions hold for what stands before them, too.
    const env = { references: this.#env.references };
    morph(this.#root, described(parse(this.#text, env)));
  }

  /** A block is over when the next one has begun with a whole line. */
  #settle() {
    const open = this.#text.slice(this.#start);
    const whole = open.lastIndexOf("\n") + 1;
    if (whole === 0) return;
    const env = { references: { ...this.#env.references } };
    const starts = parse(open.slice(0, whole), env)
      .filter((token) => token.level === 0 && token.nesting >= 0 && token.map)
      .map((token) => token.map[0]);
    if (starts.length < 2) return;
    const cut = lineStart(open, starts.at(-1));
    const nodes = described(parse(open.slice(0, cut), this.#env));
    morph(this.#root, nodes, this.#kept);
    this.#kept = this.#root.childNodes.length;
    this.#start += cut;
  }
}

function lineStart(text, line) {
  let at = 0;
  for (let count = 0; count < line; count += 1) at = text.indexOf("\n", at) + 1;
  return at;
}

/** A whole text at once. */
export function renderMarkdown(root, text) {
  const stream = new MarkdownStream(root);
  stream.write(text);
  stream.end();
}
