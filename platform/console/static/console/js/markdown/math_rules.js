/**
 * Formulas for markdown-it: `$x$`, `$$x$$` and `\(x\)` inline, `$$ ... $$` and `\[ ... \]` as blocks
 * without blank lines. A dollar sign that could be money is text: an opening one has no space after
 * it, and a closing one has no space before it and no digit after it.
 */

const MAX_CHARS = 5000; // characters of one formula
/** Commands that link, load or define something: formulas with them stay text. */
const NOT_OURS = /\\(?:href|url|includegraphics|html[A-Za-z]*|def|gdef|edef|xdef|let|newcommand|renewcommand|providecommand)(?![A-Za-z])/;
const PAIRS = [
  ["$$", "$$", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

export function mathRules(parser) {
  parser.inline.ruler.before("escape", "math", inline);
  parser.block.ruler.before("fence", "math_block", block, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
}

function inline(state, silent) {
  const { src, pos } = state;
  for (const [open, close, display] of PAIRS) {
    if (!src.startsWith(open, pos)) continue;
    const end = closing(src, pos + open.length, close, state.posMax);
    if (end < 0) return false;
    const tex = src.slice(pos + open.length, end);
    if (!isFormula(tex, close, src[end + close.length])) return false;
    if (!silent) push(state, tex.trim(), src.slice(pos, end + close.length), display);
    state.pos = end + close.length;
    return true;
  }
  return false;
}

function closing(src, from, close, max) {
  for (let index = src.indexOf(close, from); index >= 0 && index < max; index = src.indexOf(close, index + 1)) {
    if (index - from > MAX_CHARS) return -1;
    if (close[0] === "\\" || src[index - 1] !== "\\") return index;
  }
  return -1;
}

function isFormula(tex, close, next) {
  if (!tex.trim() || NOT_OURS.test(tex)) return false;
  return close !== "$" || !(/^\s|\s$/.test(tex) || /\d/.test(next ?? ""));
}

/** The opening mark starts a line, and the closing one ends a line. */
function block(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  const mark = state.src.slice(start, start + 2);
  if (mark !== "$$" && mark !== "\\[") return false;
  const close = mark === "$$" ? "$$" : "\\]";
  let line = first;
  let text = state.src.slice(start + 2, state.eMarks[first]);
  while (!text.trimEnd().endsWith(close)) {
    line += 1;
    if (line >= last || state.isEmpty(line) || text.length > MAX_CHARS || state.sCount[line] < state.blkIndent) return false;
    text += "\n" + state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  }
  const tex = text.trimEnd().slice(0, -2).trim();
  if (!tex || NOT_OURS.test(tex) || tex.includes(close)) return false;
  if (silent) return true;
  const token = push(state, tex, mark + text.trimEnd(), true);
  token.block = true;
  token.map = [first, line + 1];
  state.line = line + 1;
  return true;
}

function push(state, tex, source, display) {
  const token = state.push("math", "", 0);
  Object.assign(token, { content: tex, markup: source, meta: { display } });
  return token;
}
