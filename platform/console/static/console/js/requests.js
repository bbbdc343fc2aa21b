/** The list of requests says when newer ones have come, or shows them at once where the reader follows. */

import { follow } from "./live/live.js";

/** Between two reloads of a list that follows. */
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
