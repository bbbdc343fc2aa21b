/**
 * The block structure, line by line, as CommonMark describes it: containers (quotes, lists, items)
 * that stay open while lines continue them, and one open leaf with the text. A line only ever adds
 * to what is there; nothing before the open leaf is touched again.
 *
 * Left out on purpose: HTML (it's text), indented code, setext headings, reference links.
 */

import { el } from "../lib/dom.js";
import { CodeLeaf, TableLeaf, TextLeaf } from "./leaves.js";
import * as lines from "./lines.js";

const MAX_CONTAINERS = 8;

export class BlockBuilder {
  constructor(root) {
    this.containers = [{ type: "root", element: root }];
    this.leaf = null;
    this.trial = null;
    this.spare = []; // what the last trial added and the next line may use again
  }

  /**
   * One line, or with `whole` false the first part of one. `tryOut` undoes what a line without
   * `whole` did.
   */
  line(text, whole) {
    this.#place(text, whole);
    this.#dropSpare();
  }

  #place(text, whole) {
    const line = lines.expandTabs(text);
    const { matched, rest } = this.#match(line);
    const all = matched === this.containers.length;
    if (this.leaf instanceof CodeLeaf && all) {
      this.#codeLine(rest, whole);
    } else if (lines.isBlank(rest)) {
      this.#blank(matched);
    } else {
      const { depth, text: content } = this.#openContainers(matched, rest);
      if (depth === matched && this.#continues(all, content, whole)) return;
      this.#closeTo(depth);
      this.#openLeaf(content, whole);
    }
  }

  /** More of the line that `line` began. */
  more(text) {
    if (!this.leaf && text) this.leaf = this.#textLeaf("p");
    this.leaf?.append(text);
  }

  /** Show an unfinished last line as what it looks like so far, until `takeBack`. */
  tryOut(text) {
    this.trial = { containers: [...this.containers], leaf: this.leaf, added: [] };
    this.line(text, false);
  }

  /** Forget the line that was tried out. Its elements stay until the next line is placed. */
  takeBack() {
    if (!this.trial) return;
    const { containers, leaf, added } = this.trial;
    this.trial = null;
    this.spare = added;
    this.containers = containers;
    this.leaf = leaf;
    if (leaf) leaf.pending = "";
  }

  /** Close everything. */
  end() {
    this.takeBack();
    this.#dropSpare();
    this.#closeTo(1);
  }

  // -- containers -------------------------------------------------------------------------------

  /** How many open containers the line continues, and what is left of it inside them. */
  #match(line) {
    let rest = line;
    let matched = 1;
    for (; matched < this.containers.length; matched += 1) {
      const inner = continueContainer(this.containers[matched], rest);
      if (inner === null) break;
      rest = inner;
    }
    // A list whose item doesn't go on is only still open if the next thing is an item of it.
    if (this.containers[matched - 1].type === "list" && matched < this.containers.length) {
      const item = lines.listItem(rest);
      if (item?.kind !== this.containers[matched - 1].kind) matched -= 1;
    }
    return { matched, rest };
  }

  /** Open the quotes, lists and items that the line begins. */
  #openContainers(matched, line) {
    let depth = matched;
    let text = line;
    while (depth < MAX_CONTAINERS) {
      const quoted = lines.afterQuote(text);
      if (quoted !== null) {
        this.#closeTo(depth);
        this.#push({ type: "quote" }, "blockquote");
        text = quoted;
      } else {
        const item = this.#itemStart(depth, matched, text);
        if (!item) break;
        this.#closeTo(depth);
        this.#openItem(item);
        text = item.rest;
      }
      depth = this.containers.length;
    }
    return { depth, text };
  }

  #itemStart(depth, matched, text) {
    const item = lines.listItem(text);
    if (!item) return null;
    const inList = this.containers.slice(0, depth).some((container) => container.type === "list");
    const inParagraph = depth === matched && this.leaf instanceof TextLeaf && !inList;
    // "It was in\n1986. What a summer." is no list.
    const interrupts = item.kind === "ul" || item.number === 1;
    return inParagraph && (!interrupts || lines.isBlank(item.rest)) ? null : item;
  }

  #openItem(item) {
    const current = this.containers.at(-1);
    if (current.type !== "list" || current.kind !== item.kind) {
      const start = item.kind === "ol" && item.number !== 1 ? { start: item.number } : {};
      this.#push({ type: "list", kind: item.kind }, item.kind, start);
    }
    this.#push({ type: "item", outer: item.outer, indent: item.indent }, "li");
  }

  #push(container, tag, props = {}) {
    const make = () => ({ element: el(tag, props) });
    const { element } = this.#add(tag + JSON.stringify(props), make);
    this.containers.push({ ...container, element });
  }

  /**
   * What `make` gives ({element} or a leaf), at the end of the innermost container. The last trial's
   * is taken instead if it's of the same kind and place: a line that grows keeps its elements.
   */
  #add(kind, make) {
    const parent = this.containers.at(-1).element;
    const spare = this.spare[0];
    let added;
    if (spare?.kind === kind && spare.made.element.parentNode === parent) {
      added = this.spare.shift().made;
      added.reset?.();
    } else {
      this.#dropSpare();
      added = make();
      parent.append(added.element);
    }
    this.trial?.added.push({ kind, made: added });
    return added;
  }

  #dropSpare() {
    for (const { made } of this.spare.splice(0)) made.element.remove();
  }

  #textLeaf(tag) {
    return this.#add(tag, () => new TextLeaf(tag));
  }

  /** Close the leaf, and all containers but the first `depth`. */
  #closeTo(depth) {
    if (this.leaf) {
      this.leaf.pending = "";
      this.leaf.render(false);
    }
    this.leaf = null;
    this.containers.length = Math.max(1, depth);
  }

  // -- leaves -----------------------------------------------------------------------------------

  #blank(matched) {
    // An empty line ends a paragraph or a table, and a quote; an item stays open for what follows.
    if (this.leaf || matched < this.containers.length) this.#closeTo(matched);
  }

  #codeLine(rest, whole) {
    const { leaf } = this;
    if (whole && lines.closesFence(rest, leaf.opening)) {
      this.#closeTo(this.containers.length);
    } else if (this.trial) {
      leaf.pending = lines.mayCloseFence(rest, leaf.opening) ? "" : rest;
    } else {
      leaf.startLine(rest);
    }
  }

  /** Whether the line belongs to the open leaf; if so it's added. */
  #continues(all, text, whole) {
    const { leaf } = this;
    if (!leaf || leaf instanceof CodeLeaf || this.#startsLeaf(text, whole)) return false;
    if (leaf instanceof TableLeaf) {
      if (!all || !text.includes("|") || (!whole && !this.trial)) return false;
      return this.#give(text);
    }
    if (leaf.heading) return false;
    if (whole && all && this.#becomesTable(text)) return true;
    // A paragraph goes on in the next line even without the marks of its quote or item.
    if (!this.trial) leaf.firstLine = null;
    return this.#give(`\n${text.trimStart()}`);
  }

  #give(text) {
    if (this.trial) this.leaf.pending = text;
    else this.leaf.append(text);
    return true;
  }

  #becomesTable(text) {
    const header = this.leaf.firstLine;
    if (!header?.includes("|") || !lines.isDelimiterRow(text)) return false;
    if (lines.cells(header).length !== lines.cells(text).length) return false;
    const table = new TableLeaf(header, text);
    this.leaf.element.replaceWith(table.element);
    this.leaf = table;
    return true;
  }

  #openLeaf(text, whole) {
    if (this.#isRule(text, whole)) {
      this.#add("hr", () => ({ element: el("hr") }));
      return;
    }
    const opening = lines.fence(text);
    const title = opening ? null : lines.heading(text);
    if (opening) {
      this.leaf = this.#add(JSON.stringify(opening), () => new CodeLeaf(opening));
    } else if (title) {
      this.leaf = this.#textLeaf(`h${title.level}`);
      this.leaf.append(title.text);
    } else {
      this.leaf = this.#textLeaf("p");
      this.leaf.firstLine = whole ? text : null;
      this.leaf.append(text.trimStart());
    }
  }

  #startsLeaf(text, whole) {
    const marked = lines.fence(text) !== null || lines.heading(text) !== null;
    return marked || this.#isRule(text, whole);
  }

  /** Of a long line only the head is known: what follows the dashes would be lost. */
  #isRule(text, whole) {
    return (whole || this.trial !== null) && lines.isRule(text);
  }
}

/** What is left of a line inside a container that it continues, or null. */
function continueContainer(container, line) {
  if (container.type === "list") return line;
  if (container.type === "quote") return lines.afterQuote(line);
  if (lines.isBlank(line)) return line;
  const indent = lines.indentOf(line);
  if (indent >= container.indent) return line.slice(container.indent);
  // Models often indent an inner list by two under "1. ", where the rule would want three.
  const inner = indent >= container.outer + 2 && lines.listItem(line);
  return inner ? line.slice(indent) : null;
}
