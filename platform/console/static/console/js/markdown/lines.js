/** What a line is by its own looks; `blocks.js` decides by what is open around it. */

/** The structure of a block is decided by so many characters of a line; the rest is content. */
export const HEAD = 512;

const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])(?:( +)|$)/;
const FENCE = /^( *)(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +|$)(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
/** A last line that may still become something else: not shown until it has. */
const UNDECIDED = /^ *(?:[-*+]{1,2}|#{1,6}|>|\d{1,3}[.)]?|`{1,3}|~{1,3}|\|[ :|-]*)$/;

export const isBlank = (line) => line.trim() === "";
export const isRule = (line) => RULE.test(line);
export const isUndecided = (line) => UNDECIDED.test(line);
export const isDelimiterRow = (line) => line.includes("|") && DELIMITERS.test(line);
export const indentOf = (line) => line.length - line.trimStart().length;
export const expandTabs = (line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));

/** The line without its quote mark, or null. */
export function afterQuote(line) {
  const found = QUOTE.exec(line);
  return found ? line.slice(found[0].length) : null;
}

/** {kind: "ul" | "ol", number, indent, rest} of a line that begins a list item, or null. */
export function listItem(line) {
  const found = ITEM.exec(line);
  if (!found || isRule(line)) return null;
  const spaces = found[4]?.length ?? 1;
  const marker = found[0].length - (found[4]?.length ?? 0);
  return {
    kind: found[2] ? "ul" : "ol",
    number: Number(found[3] ?? 1),
    outer: found[1].length,
    indent: marker + (spaces > 4 ? 1 : spaces),
    rest: line.slice(marker + (spaces > 4 ? 1 : (found[4]?.length ?? 0))),
  };
}

/** {level, text} of a heading, or null. */
export function heading(line) {
  const found = HEADING.exec(line);
  return found ? { level: found[1].length, text: found[2].replace(/ +#+ *$/, "") } : null;
}

/** {indent, mark, length, language} of a line that opens a code block, or null. */
export function fence(line) {
  const found = FENCE.exec(line);
  if (!found) return null;
  return {
    indent: found[1].length,
    mark: found[2][0],
    length: found[2].length,
    language: found[3].trim().split(/\s+/)[0].slice(0, 32),
  };
}

/** Whether the line closes a code block that `opening` (a `fence`) began. */
export function closesFence(line, opening) {
  const text = line.trim();
  return (
    text.length >= opening.length && [...text].every((char) => char === opening.mark)
  );
}

/** Whether an unfinished line may yet become the closing fence. */
export function mayCloseFence(line, opening) {
  return [...line.trim()].every((char) => char === opening.mark);
}

/** The cells of a table's row. A `|` in code or after a backslash is text. */
export function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const found = text.match(/(?:\\.|`[^`]*`|[^|])+|(?<=^|\|)(?=\||$)/g) ?? [""];
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}
