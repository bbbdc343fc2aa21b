/**
 * Updates the page from node descriptions (`nodes.js`), changing only what differs: unchanged elements
 * stay, and with them the user's selection. Text is only ever inserted as text nodes.
 */

import { el } from "../lib/dom.js";

const known = new WeakMap(); // node -> its description, or its view

/** Update the children of `parent`, starting with the one at `from`, to match `wanted`. */
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

/** Try to update the node to match the description; return whether that was possible. */
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
