/** Inline tokens as nodes. Text only ever enters as text nodes. */

import { el } from "../lib/dom.js";

/** A fragment with the tokens' nodes. */
export function inlineNodes(tokens) {
  const fragment = document.createDocumentFragment();
  for (const token of tokens) fragment.append(inlineNode(token));
  return fragment;
}

/** The one node of a token. */
export function inlineNode(token) {
  switch (token.type) {
    case "text":
      return document.createTextNode(token.text);
    case "break":
      return el("br");
    case "code":
      return el("code", {}, token.text);
    case "plain":
      return el("span", {}, inlineNodes(token.children));
    case "link":
      return el(
        "a",
        { href: token.href, rel: "noopener noreferrer nofollow", target: "_blank", title: token.href },
        inlineNodes(token.children),
      );
    default: // "strong", "em", "del": the parser makes no other types
      return el(token.type, {}, inlineNodes(token.children));
  }
}
