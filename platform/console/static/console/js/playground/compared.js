/** Answers of several models to one question, side by side. */

import { el } from "../lib/dom.js";
import { AnswerView } from "./answer.js";

export class ComparedView {
  constructor(turn, actions) {
    this.turn = turn;
    const comparedViews = turn.beside.map((answer) => new AnswerView(answer, { ...actions, siblings: () => [] }));
    this.views = [new AnswerView(turn, actions), ...comparedViews];
    this.element = el("div", { class: "compared" }, ...this.views.map((view) => view.element));
  }

  draw() {
    return this.views.map((view) => view.draw()).every(Boolean);
  }
}
