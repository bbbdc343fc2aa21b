/**
 * Brings described nodes (`nodes.js`) to the page, touching what differs alone: elements that go on
 * stay, and with them a reader's selection. Text only ever enters as text nodes.
 */

import { el } from "../lib/dom.js";

const known = new WeakMap(); // node -> its description, or its view

/** Make the children of `parent` from the one at `from` on what `wanted` says. */
export function morph(parent, wanted, from = 0) {
  const there = parent.childNodes;
  const merged = joined(wanted);
  for (const [index, want] of merged.entries()) {
    const node = there[from + index];
    if (!node) parent.append(made(want));
    else if (!goesOn(node, want)) node.replaceWith(made(want));
  }
  while (there.length > from + merged.length) parent.lastChild.remove();
}

function joined(wanted) {
  const found = [];
  for (const want of wanted) {
    if (typeof want === "string" && typeof found.at(-1) === "string") {
      found[found.length - 1] += want;
    } else found.push(want);
  }
  return found;
}

/** Whether the node could be made into what is wanted; then it was. */
function goesOn(node, want) {
  if (typeof want === "string") {
    if (node.nodeType !== Node.TEXT_NODE) return false;
    if (want.startsWith(node.data)) {
      if (want.length > node.data.length) node.appendData(want.slice(node.data.length));
    } else node.data = want;
    return true;
  }
  const old = known.get(node);
  if (!old || node.localName !== want.tag) return false;
  if (want.view) {
    if (!(old instanceof want.view) || !old.fits(want)) return false;
    old.update(want);
    return true;
  }
  if (old.key !== keyOf(want)) return false;
  morph(node, want.children);
  return true;
}

function keyOf({ tag, attrs }) {
  return JSON.stringify([tag, attrs]);
}

function made(want) {
  if (typeof want === "string") return document.createTextNode(want);
  if (want.view) {
    const view = new want.view(want);
    known.set(view.element, view);
    return view.element;
  }
  const node = el(want.tag);
  for (const [name, value] of Object.entries(want.attrs)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  known.set(node, { key: keyOf(want) });
  morph(node, want.children);
  return node;
}
