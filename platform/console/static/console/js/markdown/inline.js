/**
 * The inside of a paragraph: code, emphasis, links, line breaks. Everything else is text, HTML and
 * formulas too.
 *
 * A span must close within `WINDOW` characters of where it opens. So what stands more than
 * `SETTLED_AFTER` characters before the end of the text can't change any more, whatever the model
 * still writes, and a long answer is never parsed twice (see `settled`).
 */

import { safeHref } from "./links.js";

export const WINDOW = 1000;
export const SETTLED_AFTER = WINDOW + 32;
const MAX_DEPTH = 6;
const SPECIAL = /[\\`*_~[!\nhH]/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const BARE_ADDRESS = new RegExp(`https?:\\/\\/[^\\s<>"\`]{1,${WINDOW - 10}}`, "iy");

/**
 * Tokens of `source`, in order and without gaps: {type, start, end} with `text` (text, code),
 * `children` (strong, em, del, link) or `href` (link).
 *
 * `before`: the character before the source. `live`: more may follow, so a span that is still open
 * at the end is shown as if it closed there, and its marker never flashes up.
 */
export function parseInline(source, { before = "", live = false, depth = 0, links = true } = {}) {
  const context = { source, before, live, depth, links };
  const tokens = [];
  let textStart = 0;
  let at = 0;
  const flush = (end) => {
    if (end <= textStart) return;
    tokens.push({ type: "text", start: textStart, end, text: source.slice(textStart, end) });
  };
  while (at < source.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(source);
    if (!found) break;
    at = found.index;
    const token = tokenAt(context, at);
    if (token?.skip) {
      at = token.skip;
    } else if (token) {
      flush(at);
      tokens.push(token);
      at = textStart = token.end;
    } else {
      at += 1;
    }
  }
  flush(source.length);
  return tokens;
}

/** How many characters at the start of `source` keep their tokens whatever follows the source. */
export function settled(tokens, source) {
  const limit = source.length - SETTLED_AFTER;
  let cut = 0;
  for (const token of tokens) {
    if (token.end <= limit) {
      cut = token.end;
    } else if (token.start < limit && token.type === "text" && !token.escape) {
      const splitsPair = /[\uDC00-\uDFFF]/.test(source[limit]);
      return splitsPair ? Math.max(cut, limit - 1) : limit;
    } else {
      break;
    }
  }
  return cut;
}

function tokenAt(context, at) {
  const { source } = context;
  switch (source[at]) {
    case "\n":
      return { type: "break", start: at, end: at + 1 };
    case "\\":
      return escaped(source, at);
    case "`":
      return code(context, at);
    case "*":
    case "_":
    case "~":
      return emphasis(context, at);
    case "[":
      return link(context, at, at);
    case "!":
      return source[at + 1] === "[" ? link(context, at, at + 1) : null;
    default:
      return bareAddress(context, at);
  }
}

function escaped(source, at) {
  const next = source[at + 1];
  if (next === undefined || !PUNCTUATION.test(next)) return null;
  return { type: "text", start: at, end: at + 2, text: next, escape: true };
}

/** Length of the run of one character at `at`, counted up to `most`. */
function run(source, at, most) {
  let length = 1;
  while (length < most && source[at + length] === source[at]) length += 1;
  return length;
}

function charBefore(context, at) {
  return at > 0 ? context.source[at - 1] : context.before;
}

// -- code -------------------------------------------------------------------------------------

function code(context, at) {
  const { source, live } = context;
  if (charBefore(context, at) === "`") return null;
  const ticks = run(source, at, 9);
  if (ticks === 9) return null;
  const open = at + ticks;
  const close = closingTicks(source, open, ticks, at + WINDOW);
  if (close >= 0) {
    return { type: "code", start: at, end: close + ticks, text: unpad(source.slice(open, close)) };
  }
  if (live && source.length - at <= WINDOW && open < source.length) {
    return { type: "code", start: at, end: source.length, text: unpad(source.slice(open)) };
  }
  return { skip: open };
}

function closingTicks(source, from, ticks, limit) {
  const end = Math.min(limit, source.length);
  for (let at = source.indexOf("`", from); at >= 0 && at < end; at = source.indexOf("`", at)) {
    const length = run(source, at, 9);
    if (length === ticks) return at;
    at += length;
    while (length === 9 && at < end && source[at] === "`") at += 1;
  }
  return -1;
}

/** One space on both sides belongs to the marker, so that code can begin with a backtick. */
function unpad(text) {
  const line = text.replaceAll("\n", " ");
  return /^ .*[^ ].* $/.test(line) ? line.slice(1, -1) : line;
}

// -- emphasis ---------------------------------------------------------------------------------

const KINDS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

function emphasis(context, at) {
  const { source, live } = context;
  const mark = source[at];
  const length = run(source, at, 4);
  const open = at + length;
  const kinds = mark === "~" ? (length === 2 ? ["del"] : null) : KINDS[length];
  if (!kinds || context.depth >= MAX_DEPTH || !canOpen(context, at, open)) return null;
  const close = closer(source, open, mark, length, Math.min(source.length, at + WINDOW));
  if (close >= 0) return span(context, kinds, at, open, close, close + length, false);
  const hopeful = live && source.length - at <= WINDOW && !WORD.test(charBefore(context, at));
  if (hopeful) return span(context, kinds, at, open, source.length, source.length, true);
  return { skip: open };
}

function canOpen(context, at, open) {
  const { source } = context;
  const mark = source[at];
  const previous = charBefore(context, at);
  const next = source[open];
  if (next === undefined || /\s/.test(next) || previous === mark) return false;
  if (mark === "_") return !WORD.test(previous);
  // 2*3*4 and f(x)*g(x) are arithmetic; **bold** may stand inside a word, as scripts without spaces do.
  return mark === "~" || open - at > 1 || !/[A-Za-z0-9)\]]/.test(previous);
}

/** Where the run that closes a span begins, or -1. Code in between is stepped over. */
function closer(source, open, mark, length, end) {
  let at = open;
  while (at < end) {
    const char = source[at];
    if (char === "\\") {
      at += 2;
    } else if (char === "`") {
      const ticks = run(source, at, 9);
      const close = ticks < 9 ? closingTicks(source, at + ticks, ticks, end) : -1;
      at = close >= 0 ? close + ticks : at + ticks;
    } else if (char === mark) {
      const here = run(source, at, 4);
      if (canClose(source, at, at + here, mark, length)) {
        if (here === length) return at;
        if (here === 3 && length < 3) return at + 3 - length;
      }
      at += here;
      while (here === 4 && at < end && source[at] === mark) at += 1;
    } else {
      at += 1;
    }
  }
  return -1;
}

function canClose(source, at, after, mark, length) {
  if (/\s/.test(source[at - 1])) return false;
  const next = source[after] ?? "";
  if (mark === "_") return !WORD.test(next);
  return mark === "~" || length > 1 || !/[A-Za-z0-9]/.test(next);
}

function span(context, kinds, start, open, close, end, live) {
  const inner = { depth: context.depth + 1, links: context.links, live };
  let children = parseInline(context.source.slice(open, close), inner);
  for (const type of [...kinds].reverse()) children = [{ type, start, end, children }];
  return children[0];
}

// -- links ------------------------------------------------------------------------------------

/** `[label](address)`; with a `!` before it too: pictures aren't loaded, they are linked to. */
function link(context, start, bracket) {
  const { source, live } = context;
  if (!context.links || context.depth >= MAX_DEPTH) return null;
  const limit = Math.min(source.length, start + WINDOW);
  const labelEnd = balanced(source, bracket, "[", "]", limit);
  if (labelEnd < 0 || source[labelEnd + 1] !== "(") return null;
  const addressEnd = balanced(source, labelEnd + 1, "(", ")", limit);
  const label = source.slice(bracket + 1, labelEnd);
  const inside = { depth: context.depth + 1, links: false };
  if (addressEnd < 0) {
    const open = live && source.length - start <= WINDOW && !/\s/.test(source.slice(labelEnd));
    if (!open) return null;
    const children = parseInline(label, inside);
    return { type: "plain", start, end: source.length, children };
  }
  const written = source.slice(labelEnd + 2, addressEnd).trim().split(/\s+(?=["'(])/, 1)[0];
  const href = safeHref(written.replace(/^<(.*)>$/, "$1"));
  if (href === null || !label.trim()) return null;
  const children = parseInline(label, inside);
  return { type: "link", start, end: addressEnd + 1, href, children };
}

/** Where the bracket that opens at `at` is closed, before `limit`, or -1. */
function balanced(source, at, open, close, limit) {
  let depth = 0;
  for (let i = at; i < limit; i += 1) {
    if (source[i] === "\\") i += 1;
    else if (source[i] === open) depth += 1;
    else if (source[i] === close) depth -= 1;
    if (depth === 0) return i;
  }
  return -1;
}

function bareAddress(context, at) {
  if (!context.links || WORD.test(charBefore(context, at))) return null;
  BARE_ADDRESS.lastIndex = at;
  const found = BARE_ADDRESS.exec(context.source);
  if (!found) return null;
  const text = trimAddress(found[0]);
  const href = safeHref(text);
  if (href === null) return null;
  const end = at + text.length;
  return { type: "link", start: at, end, href, children: [{ type: "text", start: at, end, text }] };
}

/** Without the sentence's own punctuation after the address, and a bracket that it didn't open. */
function trimAddress(text) {
  let address = text.replace(/[.,;:!?'"*_~]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) {
    address = address.slice(0, -1).replace(/[.,;:!?'"*_~]+$/, "");
  }
  return address;
}
