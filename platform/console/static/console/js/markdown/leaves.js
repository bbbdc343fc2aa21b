/**
 * The blocks that hold text. Each has `append` for text that stays and `pending` for an unfinished
 * last line, which is taken back and given anew with every frame.
 */

import { copyFrom } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";
import { inlineNodes } from "./inline_dom.js";
import { parseInline, settled } from "./inline.js";
import { cells } from "./lines.js";

/** A text is parsed again with each frame only from its last settled place on. */
const SETTLE_OVER = 2000;

/** A paragraph or heading. */
export class TextLeaf {
  constructor(element) {
    this.element = element;
    this.pending = "";
    this.tail = "";
    this.before = "";
    this.fixed = 0; // how many of the element's nodes are settled
  }

  append(text) {
    this.tail += text;
  }

  render(live) {
    this.#settle();
    let text = this.tail + this.pending;
    if (live) text = text.replace(/(?<!\\)(?:[*_~`]{1,3}|!?\[)$/, "");
    const tokens = parseInline(text.trimEnd(), { before: this.before, live });
    while (this.element.childNodes.length > this.fixed) this.element.lastChild.remove();
    this.element.append(inlineNodes(tokens));
  }

  #settle() {
    if (this.tail.length <= SETTLE_OVER) return;
    const tokens = parseInline(this.tail, { before: this.before });
    const cut = settled(tokens, this.tail);
    if (cut === 0) return;
    const done = parseInline(this.tail.slice(0, cut), { before: this.before });
    while (this.element.childNodes.length > this.fixed) this.element.lastChild.remove();
    this.element.append(inlineNodes(done));
    this.fixed = this.element.childNodes.length;
    this.before = this.tail[cut - 1];
    this.tail = this.tail.slice(cut);
  }
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
