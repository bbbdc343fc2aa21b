/**
 * The tool calls of a model. Tools of MCP servers run automatically, and their results are shown; for
 * other tools the user enters the results and sends them.
 */

import { el } from "../lib/dom.js";

export class CallsView {
  /** The call that an MCP server is running, or null. */
  running = null;
  #turn;
  #onResults;
  #blocks = [];
  #send = el("button", { type: "submit", class: "button small" }, "Send results");

  constructor(turn, onResults) {
    this.#turn = turn;
    this.#onResults = onResults;
    this.element = el("form", { class: "calls", hidden: true }, this.#send);
    this.element.addEventListener("submit", (event) => this.#submit(event));
  }

  /** Update the view from the turn. */
  show() {
    const { calls = [], state } = this.#turn;
    this.element.hidden = calls.length === 0;
    while (this.#blocks.length < calls.length) this.#add(calls[this.#blocks.length]);
    for (const [index, block] of this.#blocks.entries()) this.#showCall(block, calls[index], state);
    const done = calls.every((call) => isFromServer(call) && !call.failed);
    this.#send.hidden = done || this.running !== null;
    this.#send.disabled = state === "streaming";
  }

  #showCall({ code, area, status, result, text }, call, state) {
    code.textContent = `${call.name}(${call.arguments})`;
    const isRunning = this.running === call;
    area.hidden = isRunning || isFromServer(call);
    area.value ||= call.result ?? "";
    area.disabled = state === "streaming";
    status.hidden = !isRunning;
    status.textContent = isRunning ? `${call.server} is running this…` : "";
    result.hidden = !isFromServer(call);
    if (result.hidden) return;
    result.classList.toggle("failed", call.failed);
    result.querySelector("summary").textContent = call.failed ? `${call.server}: failed` : `${call.server} returned`;
    text.textContent = call.result;
  }

  #add(call) {
    const code = el("code");
    const area = el("textarea", { class: "input mono", rows: 2, placeholder: "What the tool returns", "aria-label": `Result of ${call.name}` });
    const status = el("p", { class: "engine-wait", role: "status", hidden: true });
    const text = el("pre", { tabIndex: 0, role: "group", "aria-label": `Returned by ${call.name}`, dir: "auto" });
    const result = el("details", { class: "call-result", open: true, hidden: true }, el("summary"), text);
    this.#blocks.push({ code, area, status, result, text });
    const source = el("pre", { tabIndex: 0, role: "group", "aria-label": "Call" }, code);
    this.#send.before(el("div", { class: "call" }, source, area, status, result));
  }

  #submit(event) {
    event.preventDefault();
    for (const [index, { area }] of this.#blocks.entries()) {
      if (!isFromServer(this.#turn.calls[index])) this.#turn.calls[index].result = area.value;
    }
    this.#onResults();
  }
}

function isFromServer({ server, result }) {
  return Boolean(server) && result != null;
}
