/** The turns on the page, drawn once a frame while one of them grows. */

import { AnswerView } from "./answer.js";
import { Follower } from "./follow.js";
import { QuestionView } from "./question.js";

export class Thread {
  views = [];
  #list;
  #actions;
  #frame = null;
  #growing = null;

  /** `actions`: `edit(index, text)`, `again()`, `errorActions(error)`, `followed(following)`. */
  constructor(scroller, list, actions) {
    this.#list = list;
    this.#actions = actions;
    this.follower = new Follower(scroller, (following) => actions.followed(following));
    new ResizeObserver(() => this.follower.keep()).observe(scroller);
  }

  /** Show a turn after the others. */
  add(turn) {
    const index = this.views.length;
    const view =
      turn.role === "user"
        ? new QuestionView(turn, { edit: (text) => this.#actions.edit(index, text) })
        : new AnswerView(turn, this.#actions);
    this.views.push(view);
    this.#list.append(view.element);
    this.follower.keep();
    return view;
  }

  /** Remove all turns but the first `length`. */
  truncate(length) {
    for (const view of this.views.splice(length)) view.element.remove();
    if (!this.views.includes(this.#growing)) this.#growing = null;
  }

  /** More text for the last answer. */
  write(view, text) {
    view.write(text);
    this.#grow(view);
  }

  /** More of what the model thinks before its answer. */
  think(view, text) {
    view.think(text);
    this.#grow(view);
  }

  /** The last answer is over. */
  finish(view) {
    this.#growing = null;
    view.finish();
    this.follower.keep();
  }

  #grow(view) {
    this.#growing = view;
    this.#frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = null;
    this.#growing?.draw();
    this.follower.keep();
  }
}
