/** Errors, shown where they happened: what it was, in a person's words, and the server's own. */

import { el, icon } from "../lib/dom.js";

const TITLES = {
  connection_lost: "Connection lost",
  message_too_large: "The conversation is too long",
  logged_out: "Logged out",
  foreign_origin: "Refused",
  model_not_found: "No such model",
  context_length_exceeded: "Too long for this model",
  kv_pool_too_small: "Too long for this replica",
  rate_limit_exceeded: "Rate limit reached",
  insufficient_quota: "The budget is spent",
  engine_overloaded: "The engine is busy",
  overloaded: "The engine is busy",
  engine_paused: "The model is paused",
  engine_sleeping: "The model is asleep",
  request_aborted: "Ended by the operator",
  engine_unavailable: "No replica is ready",
  engine_fault: "The engine failed",
  insufficient_scope: "Not allowed",
};
const TYPE_TITLES = {
  invalid_request_error: "The request was refused",
  rate_limit_error: "Too many requests",
  permission_error: "Not allowed",
  authentication_error: "Logged out",
  connection_error: "Connection lost",
};

/** `error`: {message, type, param, code}. `actions`: buttons to put below it. */
export function errorNotice(error, actions) {
  const title = TITLES[error.code] ?? TYPE_TITLES[error.type] ?? "The server failed";
  const names = [error.code, error.param].filter(Boolean).join(" · ");
  return el(
    "div",
    { class: "notice error", role: "alert", dataset: { code: error.code ?? "" } },
    icon("warning"),
    el(
      "div",
      { class: "notice-text" },
      el("strong", {}, title),
      el("p", {}, error.message ?? "No reason was given."),
      names ? el("code", {}, names) : null,
      actions.length ? el("div", { class: "notice-actions" }, ...actions) : null,
    ),
  );
}

/** A small button for a notice. */
export function noticeAction(text, onClick) {
  const props = { type: "button", class: "button quiet small", on: { click: onClick } };
  return el("button", props, text);
}
