/**
 * Parses Markdown with markdown-it. HTML and links other than plain web links stay text; `nodes.js`
 * creates elements from the tokens and never from a string.
 */

import MarkdownIt from "../../vendor/markdown-it.mjs";
import remend from "../../vendor/remend.mjs";
import { safeHref } from "./links.js";
import { mathRules } from "./math_rules.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.normalizeLink = (address) => safeHref(address) ?? "";
parser.normalizeLinkText = (text) => text;
parser.validateLink = (address) => address !== "";
parser.use(mathRules);

/** A last line that may still become something else: hidden until that is known. */
const UNDECIDED = /^ *(?:[-*+]{1,2}|#{1,6}|>|\d{1,9}[.)]?|`{1,3}|~{1,3}|\|[ :|-]*)$/;
/** The beginning of a mark or of a link. */
const OPEN_MARKUP = /(?<!\\)(?:[*_~`$]{1,3}|!?\[)$/;
/** In blocks of more characters, unclosed marks may flash up: searching for them would read the whole block. */
const MAX_HEALED_CHARS = 4000;
const HEAL = { htmlTags: false, comparisonOperators: false, singleTilde: false, linkMode: "text-only" };

/** `env` collects the link definitions. */
export function parse(text, env) {
  return parser.parse(text, env);
}

/** Close the marks that are still open in the last line of unfinished text. */
export function healed(text) {
  const line = text.slice(text.lastIndexOf("\n") + 1);
  if (UNDECIDED.test(line)) return text.slice(0, text.length - line.length);
  if (text.length > MAX_HEALED_CHARS) return text;
  return remend(text.replace(OPEN_MARKUP, ""), HEAL);
}
