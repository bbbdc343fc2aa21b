/**
 * Live data: topics of `/ws/console/`. All tabs of a user share one socket if the browser supports
 * locks (secure contexts); otherwise each tab has its own. Hidden tabs don't subscribe.
 */

import { Socket } from "./socket.js";
import { Tabs } from "./tabs.js";

const wants = new Map(); // key -> callbacks
const watchers = new Set();
let state = "connecting";
let tabs = null;

const keyOf = (topic, tenant) => JSON.stringify([topic, tenant ?? null]);

/** Call `listener(data)` for each update of a topic; `tenant` is a slug, or null for all. Returns an unsubscriber. */
export function follow(topic, tenant, listener) {
  const key = keyOf(topic, tenant);
  wants.set(key, (wants.get(key) ?? new Set()).add(listener));
  start();
  tell();
  return () => {
    wants.get(key)?.delete(listener);
    if (!wants.get(key)?.size) wants.delete(key);
    tell();
  };
}

/** Call `listener(state)` when the state changes: "connecting", "live", "lost", "ended" (log in again). */
export function onState(listener) {
  watchers.add(listener);
  listener(state);
}

function start() {
  if (tabs) return;
  tabs = new Tabs(document.body.dataset.reader ?? "", (handlers) => new Socket(handlers), {
    frame,
    state: (now) => {
      state = now;
      for (const listener of watchers) listener(now);
    },
  });
  document.addEventListener("visibilitychange", tell);
  addEventListener("pagehide", () => tabs.want([]));
  addEventListener("pageshow", tell);
}

function tell() {
  tabs?.want(document.hidden ? [] : [...wants.keys()]);
}

function frame({ type, topic, tenant, data }) {
  if (type !== "data") return;
  for (const listener of wants.get(keyOf(topic, tenant)) ?? []) listener(data);
}
