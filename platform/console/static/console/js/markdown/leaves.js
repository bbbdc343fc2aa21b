/**
 * The blocks that hold text. Each has `append` for text that stays and `pending` for an unfinished
 * last line, which is taken back and given anew with every frame.
 */

import { copyFrom } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";
import { inlineNode, inlineNodes } from "./inline_dom.js";
import { parseInline, settled } from "./inline.js";
import { cells } from "./lines.js";

/** A text is parsed again with each frame only from its last settled place on. */
const SETTLE_OVER = 2000;

/** A paragraph or heading. A frame touches only the nodes that its new text changes. */
export class TextLeaf {
  constructor(tag) {
    this.element = el(tag);
    this.heading = tag !== "p";
    this.reset();
  }

  /** As if new, but for what is on the page, which the next `render` goes on from. */
  reset() {
    this.pending = "";
    this.tail = "";
    this.before = "";
    this.firstLine = null;
    this.shown ??= []; // {token, key, node} of what isn't settled
  }

  append(text) {
    this.tail += text;
  }

  render(live) {
    this.#settle();
    let text = this.tail + this.pending;
    if (live) text = text.replace(/(?<!\\)(?:[*_~`]{1,3}|!?\[)$/, "");
    this.#show(parseInline(text.trimEnd(), { before: this.before, live }));
  }

  #show(tokens) {
    const keys = tokens.map((token) => JSON.stringify(token));
    let same = 0;
    while (same < keys.length && this.shown[same]?.key === keys[same]) same += 1;
    const grown = this.shown[same];
    if (grown && isText(grown.token) && isText(tokens[same])) {
      setText(grown.node, tokens[same].text);
      this.shown[same] = { token: tokens[same], key: keys[same], node: grown.node };
      same += 1;
    }
    for (const { node } of this.shown.splice(same)) node.remove();
    for (const [index, token] of tokens.slice(same).entries()) {
      const node = inlineNode(token);
      this.element.append(node);
      this.shown.push({ token, key: keys[same + index], node });
    }
  }

  #settle() {
    if (this.tail.length <= SETTLE_OVER) return;
    const cut = settled(parseInline(this.tail, { before: this.before }), this.tail);
    if (cut === 0) return;
    this.#show(parseInline(this.tail.slice(0, cut), { before: this.before }));
    this.shown = [];
    this.before = this.tail[cut - 1];
    this.tail = this.tail.slice(cut);
  }
}

function isText(token) {
  return token?.type === "text";
}

/** Text that goes on is appended, so that a selection in it stays. */
function setText(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

/** A code block: lines are appended to one text node, never rendered again. */
export class CodeLeaf {
  constructor(opening) {
    this.opening = opening;
    this.pending = "";
    this.lines = 0;
    this.settled = document.createTextNode("");
    this.open = document.createTextNode("");
    const copy = tool("copy", "Copy this code", () => copyFrom(copy, this.#text()));
    const head = el(
      "figcaption",
      { class: "code-head" },
      el("span", { class: "code-language" }, opening.language || "text"),
      copy,
    );
    const code = el("code", {}, this.settled, this.open);
    const pre = el("pre", { tabIndex: 0, role: "group", "aria-label": "Code" }, code);
    this.element = el("figure", { class: "code" }, head, pre);
  }

  /** A whole line, or the first part of a long one. */
  startLine(text) {
    const lead = new RegExp(`^ {0,${this.opening.indent}}`);
    this.settled.appendData((this.lines > 0 ? "\n" : "") + text.replace(lead, ""));
    this.lines += 1;
  }

  append(text) {
    this.settled.appendData(text);
  }

  render() {
    const data = this.pending && this.lines > 0 ? `\n${this.pending}` : this.pending;
    if (this.open.data !== data) this.open.data = data;
  }

  #text() {
    return this.settled.data + this.open.data;
  }
}

/** A table; its rows are whole lines. */
export class TableLeaf {
  constructor(header, delimiters) {
    this.pending = "";
    this.shown = null;
    this.align = cells(delimiters).map((cell) => {
      if (!cell.endsWith(":")) return "";
      return cell.startsWith(":") ? "center" : "end";
    });
    this.body = el("tbody");
    const table = el("table", {}, el("thead", {}, this.#row(header, "th")), this.body);
    this.element = el("div", { class: "table", tabIndex: 0, role: "group", "aria-label": "Table" });
    this.element.append(table);
  }

  append(line) {
    this.body.append(this.#row(line, "td"));
  }

  render() {
    this.shown?.remove();
    this.shown = this.pending ? this.#row(this.pending, "td") : null;
    if (this.shown) this.body.append(this.shown);
  }

  #row(line, tag) {
    const found = cells(line);
    const row = el("tr");
    for (const [index, align] of this.align.entries()) {
      const content = inlineNodes(parseInline(found[index] ?? ""));
      row.append(el(tag, { class: align, scope: tag === "th" ? "col" : null }, content));
    }
    return row;
  }
}
