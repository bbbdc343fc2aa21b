/** The list of requests says when newer ones have come. Rows never move under a reader's eyes. */

import { follow } from "./live/live.js";

const list = document.querySelector("[data-newest]");

if (list) {
  const news = document.getElementById("newer");
  follow("requests", list.dataset.followed || null, ({ newest }) => {
    if (newest > Number(list.dataset.newest)) news.hidden = false;
  });
}
