/** An answer: growing Markdown, tool calls, figures below it, and an error in its place. */

import { copyFrom } from "../lib/clipboard.js";
import { el, tool } from "../lib/dom.js";
import { count, duration, plural, rate } from "../lib/format.js";
import { ROOT } from "../lib/root.js";
import { MarkdownStream, renderMarkdown } from "../markdown/stream.js";
import { branches } from "./branches.js";
import { CallsView } from "./calls.js";
import { errorNotice } from "./errors.js";
import { FeedbackView } from "./feedback.js";
import { TokensView } from "./tokens.js";
import { ThinkingView } from "./thinking.js";

const ENDINGS = {
  length: "cut at the length limit",
  abort: "stopped",
  error: "failed",
  tool_calls: "calls tools",
};

const FENCE = "```json\n";

export class AnswerView {
  /**
   * `actions`: `again()` asks anew; `errorActions(error)` gives the buttons for an error; `results()` asks
   * on with the results of calls; `siblings(turn)`, `choose(turn)` for its branches.
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.stream = null;
    this.fenced = false; // shown as code because it starts like JSON
    this.thinking = new ThinkingView(turn);
    this.calls = new CallsView(turn, () => actions.results());
    this.prose = el("div", { class: "prose", dir: "auto" });
    this.wait = el("p", { class: "engine-wait", role: "status", hidden: true }, "Waiting for the engine…");
    this.figures = el("p", { class: "colophon" });
    this.errors = el("div", { class: "turn-error" });
    this.branches = el("div", { class: "turn-branches" });
    this.copy = tool("copy", "Copy the answer", () => copyFrom(this.copy, turn.text));
    this.tokens = new TokensView(turn, this.prose);
    const again = tool("again", "Answer again", () => actions.again());
    again.classList.add("only-last", "asks");
    this.feedback = new FeedbackView(turn);
    this.tools = el("div", { class: "turn-tools" }, this.feedback.element, this.tokens.button, this.copy, again);
    this.who = el("h2", { class: "turn-who" }, turn.model ?? "Answer");
    this.element = el(
      "article",
      { class: "turn answer", "aria-label": `Answer of ${turn.model}` },
      this.who,
      this.thinking.element,
      this.prose,
      this.tokens.element,
      this.calls.element,
      this.wait,
      this.errors,
      el("footer", { class: "turn-foot" }, this.branches, this.figures, this.tools),
    );
    if (turn.state !== "streaming") renderMarkdown(this.prose, isJson(turn.text) ? fenced(turn.text) : turn.text);
    else if (turn.text) this.#open();
    this.#show();
  }

  /** Append reasoning; it is drawn with the next `draw`. */
  think(text) {
    this.#begin();
    this.thinking.write(text);
    if (this.element.dataset.state === "waiting") this.#show();
  }

  /** Append text; it is drawn with the next `draw`. */
  write(text) {
    this.#begin();
    this.turn.text += text;
    if (this.stream) this.stream.write(text);
    else this.#open();
    if (this.element.dataset.state === "waiting") this.#show();
  }

  #open() {
    this.thinking.end();
    const { text } = this.turn;
    if (text.trim() === "") return; // the format isn't known yet
    this.fenced = text.trimStart().startsWith("{");
    this.stream = new MarkdownStream(this.prose);
    this.stream.write(this.fenced ? FENCE + text : text);
  }

  /** Add a tool call, or more of its arguments. */
  call(change) {
    this.#begin();
    this.turn.calls ??= [];
    change(this.turn.calls);
    this.calls.show();
    if (this.element.dataset.state === "waiting") this.#show();
  }

  /** Show that no replica has the request yet; the next content hides this. */
  waitForEngine() {
    this.wait.hidden = false;
  }

  #begin() {
    this.wait.hidden = true;
  }

  /** Draw what was appended, once per frame. Returns false if there is more to draw. */
  draw() {
    this.thinking.draw();
    return this.stream?.flush() ?? true;
  }

  /** The answer has ended in the state given by `turn`. */
  finish() {
    this.#begin();
    this.thinking.end();
    const json = isJson(this.turn.text);
    if (json !== this.fenced) renderMarkdown(this.prose, json ? fenced(this.turn.text) : this.turn.text);
    else this.stream?.end();
    this.stream = null;
    this.#show();
  }

  #show() {
    const { turn } = this;
    const streaming = turn.state === "streaming";
    const waiting = streaming && turn.text === "" && !turn.reasoning && !turn.calls?.length;
    this.element.dataset.state = waiting ? "waiting" : (turn.state ?? "done");
    this.element.setAttribute("aria-busy", String(streaming));
    this.copy.hidden = turn.text === ""; // an error without text has nothing to copy
    this.feedback.show();
    this.tokens.button.hidden = streaming || !turn.logprobs?.length;
    this.figures.replaceChildren(...figures(turn));
    this.branches.replaceChildren(...branches(turn, this.actions));
    this.calls.show();
    const actions = turn.error ? this.actions.errorActions(turn.error) : [];
    this.errors.replaceChildren(...(turn.error ? [errorNotice(turn.error, actions)] : []));
  }
}

function fenced(text) {
  return `${FENCE}${text}\n\`\`\``;
}

/** Whether the text is a JSON object or array, as with a response schema: it is shown as code. */
function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function figures(turn) {
  const parts = turn.stats ? statParts(turn.stats) : [];
  const ending = turn.state === "stopped" ? "stopped" : ENDINGS[turn.stats?.finish_reason];
  if (ending) parts.push(el("span", { class: "ending" }, ending));
  return parts;
}

function statParts({ usage, ttft_ms: ttft, tokens_per_s: speed, seed, request }) {
  const part = (name, text, title) => el("span", { class: name, title }, text);
  const parts = [];
  if (usage) parts.push(part("tokens", plural(usage.completion_tokens, "token"), "Output tokens"));
  if (speed > 0) parts.push(part("speed", `${rate(speed)} tok/s`, "Output tokens a second"));
  if (Number.isFinite(ttft)) {
    parts.push(part("ttft", `first after ${duration(ttft)}`, "Time to first token"));
  }
  if (usage) parts.push(part("prompt", promptText(usage), "Prompt tokens, and those found in the cache"));
  if (request) {
    const title = "How this answer came about: queue, prompt, output, cost";
    parts.push(el("a", { class: "request", href: `${ROOT}console/requests/${encodeURIComponent(request)}/`, title }, "request"));
  }
  if (seed !== undefined) parts.push(part("seed", `seed ${seed}`, "With this seed the same question gets the same answer"));
  return parts;
}

function promptText(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const prompt = `prompt ${count(usage.prompt_tokens)}`;
  return cached > 0 ? `${prompt}, ${count(cached)} cached` : prompt;
}
