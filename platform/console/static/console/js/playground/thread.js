/** The turns on the page, drawn once per frame while one of them grows. */

import { AnswerView } from "./answer.js";
import { ComparedView } from "./compared.js";
import { Follower } from "./follow.js";
import { QuestionView } from "./question.js";

export class Thread {
  views = [];
  #list;
  #actions;
  #frame = null;
  #growing = new Set();

  /**
   * `actions`: `edit(index, text)`, `again()`, `results()`, `siblings(turn)`, `choose(turn)`,
   * `errorActions(error)`, `followed(following)`.
   */
  constructor(scroller, list, actions) {
    this.#list = list;
    this.#actions = actions;
    this.follower = new Follower(scroller, list, (following) => actions.followed(following));
  }

  /** Append a turn. */
  add(turn) {
    const view = this.#view(turn, this.views.length);
    this.views.push(view);
    this.#list.append(view.element);
    return view;
  }

  #view(turn, index) {
    if (turn.role !== "user") return new (turn.beside?.length ? ComparedView : AnswerView)(turn, this.#actions);
    return new QuestionView(turn, { ...this.#actions, edit: (text) => this.#actions.edit(index, text) });
  }

  /** Remove all turns except the first `length`. */
  truncate(length) {
    for (const view of this.views.splice(length)) {
      view.element.remove();
      for (const answerView of view.views ?? [view]) this.#growing.delete(answerView);
    }
  }

  /** Change a growing answer with `change(view)`. */
  grow(view, change) {
    change(view);
    this.#growing.add(view);
    this.#frame ??= requestAnimationFrame(() => this.#draw());
  }

  /** An answer has ended. */
  finish(view) {
    this.#growing.delete(view);
    view.finish();
  }

  #draw() {
    this.#frame = null;
    let drawn = true;
    for (const view of this.#growing) {
      if (view.draw()) this.#growing.delete(view);
      else drawn = false;
    }
    if (!drawn) this.#frame = requestAnimationFrame(() => this.#draw());
  }
}
