/** Polls a JSON endpoint when one of its topics changes, or periodically while the socket is down. */

import { Poll } from "../lib/poll.js";
import { follow, onState } from "./live.js";

const FALLBACK_EVERY = 15_000;

/** `topics`: pairs of a topic and a tenant's slug (null: all). `handlers`: those of `Poll`. */
export function askOnNews(url, topics, handlers) {
  let live = false;
  const asking = new Poll(url, () => (live ? null : FALLBACK_EVERY), handlers);
  onState((state) => {
    if (state === "ended") handlers.loggedOut();
    if (state === "lost" && live) asking.now();
    live = state === "live";
  });
  asking.now();
  for (const [topic, tenant] of topics) {
    follow(topic, tenant, () => {
      live = true;
      asking.now();
    });
  }
}
