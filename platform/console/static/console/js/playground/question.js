/** What the reader wrote: plain text, which can be changed and sent again. */

import { copyFrom } from "../lib/clipboard.js";
import { el, icon, tool } from "../lib/dom.js";
import { branches } from "./branches.js";

export class QuestionView {
  /**
   * `actions`: `edit(text)` sends the changed text beside this turn; `siblings`, `choose`: its branches; `picture(id)`
   * gives the address of a picture.
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.text = el("div", { class: "question-text", dir: "auto" }, turn.text);
    this.editButton = tool("edit", "Edit and send again", () => this.edit());
    this.editButton.classList.add("asks");
    const copy = tool("copy", "Copy", () => copyFrom(copy, turn.text));
    this.tools = el("div", { class: "turn-tools" }, copy, this.editButton);
    this.element = el(
      "article",
      { class: "turn question", "aria-label": "Your message" },
      el("h2", { class: "turn-who" }, "You"),
      turn.images?.length ? this.#pictures() : null,
      this.text,
      el("div", { class: "turn-branches" }, ...branches(turn, actions)),
      this.tools,
    );
  }

  #pictures() {
    const pictures = this.turn.images.map(({ id, name, kind }) => {
      const href = this.actions.picture(id);
      if (kind === "document") return el("li", { class: "document" }, el("a", { href, title: `Download ${name}` }, icon("file"), name));
      const image = el("img", { src: href, alt: name, loading: "lazy" });
      return el("li", { class: "picture" }, el("a", { href, title: `Download ${name}` }, image));
    });
    return el("ul", { class: "pictures", "aria-label": "Pictures and documents" }, ...pictures);
  }

  /** Turn the text into a field, in its place. */
  edit() {
    if (this.form) return;
    const area = el("textarea", {
      class: "input",
      value: this.turn.text,
      "aria-label": "Your message",
      rows: Math.min(12, this.turn.text.split("\n").length + 1),
    });
    const send = el("button", { type: "submit", class: "button small" }, "Send again");
    const cancel = el("button", { type: "button", class: "button quiet small" }, "Cancel");
    this.form = el("form", { class: "question-edit" }, area, el("div", {}, send, cancel));
    this.form.addEventListener("submit", (event) => this.#submit(event, area));
    cancel.addEventListener("click", () => this.#close());
    area.addEventListener("keydown", (event) => this.#key(event));
    this.text.replaceWith(this.form);
    this.tools.hidden = true;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  #key(event) {
    if (event.key === "Escape") {
      event.stopPropagation();
      this.#close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.form.requestSubmit();
    }
  }

  #submit(event, area) {
    event.preventDefault();
    const text = area.value.trim();
    if (!text && !this.turn.images) return;
    if (this.actions.edit(text) === false) return;
  }

  #close() {
    this.form.replaceWith(this.text);
    this.form = null;
    this.tools.hidden = false;
    this.editButton.focus();
  }
}
