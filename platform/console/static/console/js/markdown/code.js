/** A code block: plain text at once, highlighted when the grammar is loaded and the text has stopped changing. */

import { copyFrom } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";

const VENDOR = new URL("../../vendor/highlight/", import.meta.url);
const LANGUAGES = new Set(
  "bash c cpp csharp css diff dockerfile go graphql haskell http ini java javascript json julia kotlin latex less lua makefile markdown nginx objectivec perl php plaintext powershell protobuf python r ruby rust scala scss shell sql swift typescript vbnet xml yaml".split(" "),
);
const ALIASES = {
  sh: "bash", zsh: "bash", console: "shell", "c++": "cpp", cc: "cpp", h: "c", "c#": "csharp", cs: "csharp",
  patch: "diff", docker: "dockerfile", golang: "go", hs: "haskell", toml: "ini", js: "javascript",
  jsx: "javascript", mjs: "javascript", jsonc: "json", jl: "julia", kt: "kotlin", tex: "latex",
  make: "makefile", md: "markdown", ps1: "powershell", py: "python", py3: "python", rb: "ruby",
  rs: "rust", ts: "typescript", tsx: "typescript", html: "xml", svg: "xml", yml: "yaml",
}; // prettier-ignore
const STILL_FOR = 250; // milliseconds without a change
const MAX_CHARS = 50_000; // of a highlighted block

export class CodeView {
  #text = document.createTextNode("");
  #code;
  #language;
  #timer = null;

  constructor({ language, text }) {
    this.#language = language;
    const copy = tool("copy", "Copy this code", () => copyFrom(copy, this.#source));
    const name = el("span", { class: "code-language" }, language || "text");
    this.#code = el("code", { dir: "ltr" }, this.#text);
    const pre = el("pre", { tabIndex: 0, role: "group", "aria-label": "Code" }, this.#code);
    this.element = el("figure", { class: "code" }, el("figcaption", { class: "code-head" }, name, copy), pre);
    this.update({ text });
  }

  #source = "";

  fits({ language }) {
    return language === this.#language;
  }

  update({ text }) {
    const source = text.replace(/\n$/, "");
    if (source === this.#source) return;
    const grown = source.startsWith(this.#source) && this.#text.isConnected;
    if (grown || this.#code.childNodes.length === 1) {
      const old = this.#text.data;
      if (source.startsWith(old)) this.#text.appendData(source.slice(old.length));
      else this.#text.data = source;
    } else {
      this.#text.data = source;
      this.#code.replaceChildren(this.#text);
    }
    this.#source = source;
    clearTimeout(this.#timer);
    if (nameOf(this.#language) && source.length <= MAX_CHARS) {
      this.#timer = setTimeout(() => this.#colour(source), STILL_FOR);
    }
  }

  async #colour(source) {
    const nodes = await highlighted(nameOf(this.#language), source);
    // Highlighting would discard the user's selection: wait for the next page load.
    const selected = !getSelection().isCollapsed && getSelection().containsNode(this.#code, true);
    if (source !== this.#source || selected || !nodes) return;
    this.#code.replaceChildren(...nodes);
  }
}

function nameOf(language) {
  const low = language.toLowerCase();
  const name = ALIASES[low] ?? low;
  return LANGUAGES.has(name) ? name : null;
}

let core = null;

async function highlighted(name, source) {
  try {
    core ??= import(new URL("core.mjs", VENDOR));
    const library = (await core).default;
    if (!library.getLanguage(name)) {
      const grammar = await import(new URL(`${name}.mjs`, VENDOR));
      library.registerLanguage(name, grammar.default);
    }
    return spans(library.highlight(source, { language: name, ignoreIllegals: true })._emitter.rootNode);
  } catch (error) {
    console.warn("The code can't be coloured:", error);
    return null;
  }
}

/** Convert the library's tree to nodes; its HTML string is never used. */
function spans(node) {
  return node.children.map((child) => {
    if (typeof child === "string") return document.createTextNode(child);
    const scope = (child.scope ?? "").split(".")[0].replace(/[^\w-]/g, "");
    return el("span", scope ? { class: `hl-${scope}` } : {}, ...spans(child));
  });
}
