/** The page of speech: a microphone with live text, files of sound, and a player that their text follows. */

import { byId, el } from "../lib/dom.js";
import { duration } from "../lib/format.js";
import { ROOT } from "../lib/root.js";
import { Microphone } from "./microphone.js";
import { sendForm } from "./server.js";
import { LiveTranscript } from "./live_transcript.js";
import { listModels } from "./tab_models.js";

const form = byId("run");
const { runUrl, socketUrl, apiPath } = form.dataset;
const { model, language, file } = form.elements;
const [record, stop, choose] = [byId("speech-record"), byId("speech-stop"), byId("speech-choose")];
const [level, state, player, lines] = [byId("speech-level"), byId("run-state"), byId("speech-player"), byId("speech-lines")];

let cues = []; // {start, end, item}: seconds of the sound that the player has, in order
let mayRun = false;

function say(text) {
  state.textContent = text;
}

function setBusy(isBusy) {
  record.disabled = choose.disabled = isBusy || !mayRun;
}

// -- Lines of text.

function clock(seconds) {
  const rounded = Math.floor(seconds);
  return `${Math.floor(rounded / 60)}:${String(rounded % 60).padStart(2, "0")}`;
}

/** A line of text at its time; a click on it plays from there. Returns a function that says more in it. */
function addLine(start) {
  const text = el("span", { class: "line-text", dir: "auto" });
  const item = el("button", { type: "button", class: "line" }, el("span", { class: "line-time" }, clock(start)), text);
  const cue = { start, end: Infinity, item, text: "" };
  item.addEventListener("click", () => {
    if (player.hidden) return; // still recording
    player.currentTime = cue.start;
    player.play();
  });
  cues.push(cue);
  lines.append(el("li", {}, item));
  return cue;
}

function setText(cue, text) {
  cue.text = text;
  cue.item.lastChild.textContent = text;
}

/** Empty the page for another sound. */
function clear() {
  cues = [];
  lines.replaceChildren();
  player.hidden = true;
  player.removeAttribute("src");
  byId("result-figures").textContent = "";
  byId("speech-subtitles").hidden = true;
  byId("result").hidden = false;
}

/** Offer the sound to play, and the lines as subtitles. */
function showPlayer(sound) {
  URL.revokeObjectURL(player.src);
  player.src = URL.createObjectURL(sound);
  player.hidden = false;
  byId("speech-subtitles").hidden = cues.length === 0;
}

player.addEventListener("timeupdate", () => {
  const now = player.currentTime;
  for (const { start, end, item } of cues) {
    const isSpoken = start <= now && now < end;
    if (isSpoken && !item.hasAttribute("aria-current")) item.scrollIntoView({ block: "nearest" });
    if (isSpoken) item.setAttribute("aria-current", "true");
    else item.removeAttribute("aria-current");
  }
});

// -- Files.

async function transcribe(sound) {
  setBusy(true);
  clear();
  say(`Transcribing ${sound.name}…`);
  const startedAt = performance.now();
  try {
    const fields = { model: model.value, language: language.value, response_format: "verbose_json", file: sound };
    const answer = await sendForm(runUrl, fields);
    for (const { start, end, text } of answer.segments) {
      const cue = addLine(start);
      cue.end = end;
      setText(cue, text.trim());
    }
    byId("result-figures").textContent = `${duration(answer.duration * 1000)} of sound in ${duration(performance.now() - startedAt)}`;
    say(answer.segments.length ? "" : "Nobody speaks in it.");
    showPlayer(sound);
  } catch (error) {
    byId("result").hidden = true;
    say(error.message);
  } finally {
    setBusy(false);
  }
}

choose.addEventListener("click", () => file.click());
file.addEventListener("change", () => {
  if (file.files.length) transcribe(file.files[0]);
  file.value = ""; // the same file can be chosen again
});

for (const type of ["dragover", "dragleave", "drop"]) {
  addEventListener(type, (event) => {
    event.preventDefault(); // otherwise the browser would open the file
    form.classList.toggle("over", type === "dragover");
    const [dropped] = event.dataTransfer.files;
    if (type === "drop" && dropped && !choose.disabled) transcribe(dropped);
  });
}

// -- The microphone.

let recording = null; // {microphone, transcript, cues by item}

record.addEventListener("click", async () => {
  setBusy(true);
  say("Asking for the microphone…");
  const microphone = new Microphone();
  const cueOf = new Map();
  const transcript = new LiveTranscript(socketUrl, { model: model.value, language: language.value }, {
    turn: (item, start) => cueOf.set(item, addLine(start)),
    turnEnded: (item, end) => (cueOf.get(item).end = end),
    text: (item, text) => setText(cueOf.get(item), text),
    failed: (message) => finish(message),
  });
  recording = { microphone, transcript };
  try {
    await microphone.start(
      (chunk, loudness) => {
        level.value = loudness;
        transcript.append(chunk);
      },
      () => finish("The microphone is gone."),
    );
  } catch (error) {
    recording = null;
    transcript.close();
    await microphone.stop();
    say(error.message);
    setBusy(false);
    return;
  }
  if (!recording) {
    await microphone.stop(); // the transcript was refused while the user was asked for permission
    return;
  }
  clear();
  say("Recording…");
  record.hidden = true;
  stop.hidden = level.hidden = false;
  stop.focus();
});

stop.addEventListener("click", () => finish(""));

/** End the recording; a `problem` interrupted the text, so that the recorded sound is sent as a file instead. */
async function finish(problem) {
  if (!recording) return;
  const { microphone, transcript } = recording;
  recording = null;
  if (problem) transcript.close(); // its lines would mix with those of the file
  const sound = await microphone.stop();
  stop.hidden = level.hidden = true;
  record.hidden = false;
  level.value = 0;
  say("Finishing the text…");
  const lost = problem || (await transcript.finish());
  if (lost) {
    await transcribe(sound);
    say(`${lost} ${state.textContent || "The text is that of the recorded sound."}`);
  } else {
    for (const cue of cues.filter(({ text }) => !text)) cue.item.parentElement.remove();
    cues = cues.filter(({ text }) => text);
    say(cues.length ? "" : "Nobody spoke.");
    showPlayer(sound);
    setBusy(false);
  }
  record.focus();
}

// -- Subtitles.

byId("speech-subtitles").addEventListener("click", () => {
  const time = (seconds) => new Date(Math.min(seconds, player.duration || 0) * 1000).toISOString().slice(11, 23);
  const parts = cues.map(({ start, end, text }) => `${time(start)} --> ${time(end)}\n${text.replaceAll("-->", "->")}\n`);
  const url = URL.createObjectURL(new Blob([["WEBVTT\n", ...parts].join("\n")], { type: "text/vtt" }));
  el("a", { href: url, download: "subtitles.vtt" }).click();
  URL.revokeObjectURL(url);
});

// On a narrow page the last tab is out of view.
document.querySelector(".playground-tabs [aria-current]").scrollIntoView({ block: "nearest" });

const url = new URL(ROOT + apiPath.slice(1), location.origin).href;
byId("result-code").textContent = `curl ${url} -H "Authorization: Bearer $QUIRE_API_KEY" -F file=@speech.wav -F response_format=vtt`;

listModels(form, say, (isAllowed) => {
  mayRun = isAllowed;
  setBusy(false);
});
