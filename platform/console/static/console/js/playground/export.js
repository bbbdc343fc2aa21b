/** Exports a stored conversation as a Markdown file. */

import { el } from "../lib/dom.js";

const NAMES = { user: "You", assistant: "Answer" };

/** Format the turns on the path to the leaf. `document`: in the form stored on the server. */
export function toMarkdown(title, document) {
  const nodes = new Map(document.turns.map((turn) => [turn.id, turn]));
  const turns = [];
  for (let turn = nodes.get(document.leaf); turn; turn = nodes.get(turn.parent)) turns.unshift(turn);
  const parts = [`# ${title}`];
  if (document.system?.trim()) parts.push("## System prompt", document.system.trim());
  for (const turn of turns) {
    for (const answer of [turn, ...(turn.beside ?? [])]) {
      const model = answer.model ? ` (${answer.model})` : "";
      parts.push(`## ${NAMES[turn.role]}${model}`, answer.text ?? "");
      for (const { name } of answer.images ?? []) parts.push(`Picture: ${name}`);
      for (const { name, arguments: json } of answer.calls ?? []) parts.push(`Calls \`${name}\` with \`${json}\``);
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** Let the browser save `text` as a file. */
export function saveFile(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  el("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
