/**
 * Converts markdown-it tokens to plain node descriptions, which `morph.js` renders: a string,
 * {tag, attrs, children}, or {view, ...} for a component with its own state.
 */

import { CodeView } from "./code.js";
import { MathView } from "./math.js";

const TASK = /^\[([ xX])\] /;

/** Describe the tokens of complete blocks. */
export function described(tokens) {
  const root = { children: [] };
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const node = element(token);
      open.at(-1).children.push(node.outer ?? node);
      open.push(node);
    } else if (token.type === "inline") {
      open.at(-1).children.push(...inline(token, open));
    } else open.at(-1).children.push(...leaf(token));
  }
  return root.children;
}

/** Attributes of Markdown's elements that a page needs. */
function element(token) {
  const { tag } = token;
  const node = { tag, attrs: {}, children: [] };
  if (tag === "a") node.attrs = link(token.attrGet("href"));
  else if (tag === "ol") node.attrs = { start: token.attrGet("start") };
  else if (tag === "th" || tag === "td") node.attrs = cell(token);
  else if (tag === "table") {
    const attrs = { class: "table", tabindex: "0", role: "group", "aria-label": "Table" };
    node.outer = { tag: "div", attrs, children: [node] };
  }
  if (/^(?:p|h\d|li|td|th|blockquote)$/.test(tag)) node.attrs.dir = "auto";
  return node;
}

function link(href) {
  return { href, title: href, rel: "noopener noreferrer nofollow", target: "_blank" };
}

function cell(token) {
  const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1];
  return {
    class: { center: "center", right: "end" }[align] ?? null,
    scope: token.tag === "th" ? "col" : null,
  };
}

function inline(token, open) {
  const children = described(token.children);
  const item = open.at(-2);
  const task = item?.tag === "li" && typeof children[0] === "string" && TASK.exec(children[0]);
  if (!task || item.attrs.class) return children;
  const done = task[1] !== " ";
  item.attrs.class = "task";
  children[0] = children[0].slice(4);
  const attrs = { class: "task-box", role: "img", "aria-label": done ? "Done" : "To do" };
  return [{ tag: "span", attrs, children: [done ? "☑" : "☐"] }, ...children];
}

function leaf(token) {
  switch (token.type) {
    case "text":
      return token.content ? [token.content] : [];
    case "softbreak":
    case "hardbreak":
      return [{ tag: "br", attrs: {}, children: [] }];
    case "code_inline":
      return [{ tag: "code", attrs: {}, children: [token.content] }];
    case "image": {
      const label = described(token.children);
      const href = token.attrGet("src");
      return [{ tag: "a", attrs: link(href), children: label.length ? label : [href] }];
    }
    case "fence":
    case "code_block":
      return [{ view: CodeView, tag: "figure", language: languageOf(token), text: token.content }];
    case "math":
      return [{ view: MathView, tag: "span", tex: token.content, source: token.markup, ...token.meta }];
    case "hr":
      return [{ tag: "hr", attrs: {}, children: [] }];
    default:
      return token.content ? [token.content] : [];
  }
}

function languageOf(token) {
  return (token.info ?? "").trim().split(/\s+/)[0].slice(0, 32);
}
