/** The list of requests: announces newer ones, or shows them at once if the user follows the list. */

import { follow } from "./live/live.js";

/** Minimum interval between two reloads of a followed list, in milliseconds. */
const RELOAD_EVERY_MS = 2000;

const list = document.querySelector("[data-newest]");

if (list) {
  const news = document.getElementById("newer");
  let reloading = false;
  follow("requests", list.dataset.followed || null, ({ newest }) => {
    if (newest <= Number(list.dataset.newest)) return;
    if (!("follows" in list.dataset)) news.hidden = false;
    else if (!reloading) {
      reloading = true;
      setTimeout(() => location.reload(), RELOAD_EVERY_MS);
    }
  });
}
