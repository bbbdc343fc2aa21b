/** Two answers to one question, side by side. */

import { el } from "../lib/dom.js";
import { AnswerView } from "./answer.js";

export class PairView {
  constructor(turn, actions) {
    this.turn = turn;
    this.views = [new AnswerView(turn, actions), new AnswerView(turn.beside, { ...actions, siblings: () => [] })];
    this.element = el("div", { class: "pair" }, ...this.views.map((view) => view.element));
  }

  draw() {
    return this.views.map((view) => view.draw()).every(Boolean);
  }
}
