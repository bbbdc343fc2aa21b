/**
 * Updates the page from node descriptions (`nodes.js`), changing only what differs: unchanged elements
 * stay, and with them the user's selection. Text is only ever inserted as text nodes.
 */

import { el } from "../lib/dom.js";

const descriptions = new WeakMap(); // node -> its description, or its view

/** Update the children of `parent`, starting with the one at `from`, to match `children`. */
export function morph(parent, children, from = 0) {
  const current = parent.childNodes;
  const merged = joined(children);
  for (const [index, want] of merged.entries()) {
    const node = current[from + index];
    if (!node) parent.append(create(want));
    else if (!goesOn(node, want)) node.replaceWith(create(want));
  }
  while (current.length > from + merged.length) parent.lastChild.remove();
}

function joined(children) {
  const merged = [];
  for (const want of children) {
    if (typeof want === "string" && typeof merged.at(-1) === "string") {
      merged[merged.length - 1] += want;
    } else merged.push(want);
  }
  return merged;
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
  const old = descriptions.get(node);
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

function create(want) {
  if (typeof want === "string") return document.createTextNode(want);
  if (want.view) {
    const view = new want.view(want);
    descriptions.set(view.element, view);
    return view.element;
  }
  const node = el(want.tag);
  for (const [name, value] of Object.entries(want.attrs)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  descriptions.set(node, { key: keyOf(want) });
  morph(node, want.children);
  return node;
}
