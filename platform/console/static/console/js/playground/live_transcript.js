/** Text of sound while it is recorded, by the realtime API with the page's session. */

import { RATE } from "./microphone.js";

const TRANSCRIPTION = "conversation.item.input_audio_transcription";

export class LiveTranscript {
  #socket;
  #handlers;
  #waiting = []; // events until the socket is open
  #texts = new Map(); // by item
  #numOpen = 0; // turns whose text isn't complete
  #sentS = 0;
  #turnEndS = 0; // of the last turn
  #speaking = null; // item of the turn in progress
  #isCleared = false;
  #resolve = null;
  #failure = "";

  /**
   * `handlers`: `turn(item, start)` and `turnEnded(item, end)` in seconds of the sound, `text(item, text)`,
   * `failed(message)`.
   */
  constructor(address, { model, language }, handlers) {
    this.#handlers = handlers;
    const url = new URL(address, location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    url.searchParams.set("model", model);
    this.#socket = new WebSocket(url);
    this.#socket.addEventListener("open", () => this.#waiting.splice(0).forEach((text) => this.#socket.send(text)));
    this.#socket.addEventListener("message", ({ data }) => this.#receive(JSON.parse(data)));
    this.#socket.addEventListener("close", () => this.#fail("The connection was lost."));
    const input = { format: { type: "audio/pcm", rate: RATE }, transcription: { language: language || null } };
    this.#send("session.update", { session: { type: "transcription", audio: { input } } });
  }

  /** More sound: an Int16Array. */
  append(samples) {
    this.#sentS += samples.length / RATE;
    this.#send("input_audio_buffer.append", { audio: btoa(String.fromCharCode(...new Uint8Array(samples.buffer))) });
  }

  /** Wait for the text of all sound, and close. Returns why it isn't complete, or "". */
  async finish() {
    this.#send("input_audio_buffer.commit");
    this.#send("input_audio_buffer.clear"); // its confirmation arrives after that of the commit
    await new Promise((resolve) => {
      this.#resolve = resolve;
      if (this.#failure) resolve();
    });
    this.close();
    return this.#failure;
  }

  close() {
    this.#resolve = null;
    this.#handlers = null;
    this.#socket.close();
  }

  #send(type, fields = {}) {
    const text = JSON.stringify({ type, ...fields });
    if (this.#socket.readyState === WebSocket.CONNECTING) this.#waiting.push(text);
    else this.#socket.send(text); // a closed one drops it
  }

  #fail(message) {
    if (!this.#handlers || this.#failure) return;
    this.#failure = message;
    if (this.#resolve) this.#resolve();
    else this.#handlers.failed(message);
  }

  #receive(event) {
    if (!this.#handlers) return;
    const { type, item_id: item } = event;
    if (type === "input_audio_buffer.speech_started") this.#begin(item, event.audio_start_ms / 1000);
    else if (type === "input_audio_buffer.speech_stopped") this.#turnEndS = event.audio_end_ms / 1000;
    else if (type === "input_audio_buffer.committed") this.#commit(item);
    else if (type === "input_audio_buffer.cleared") this.#isCleared = true;
    else if (type === `${TRANSCRIPTION}.delta`) this.#say(item, this.#texts.get(item) + event.delta);
    else if (type === `${TRANSCRIPTION}.completed`) {
      this.#say(item, event.transcript);
      this.#numOpen -= 1;
    } else if (type === `${TRANSCRIPTION}.failed`) this.#fail(event.error.message);
    else if (type === "error" && event.error.code !== "input_audio_buffer_commit_empty") this.#fail(event.error.message);
    if (this.#isCleared && !this.#numOpen) this.#resolve?.();
  }

  #begin(item, start) {
    this.#speaking = item;
    this.#texts.set(item, "");
    this.#handlers.turn(item, start);
  }

  /** A turn ends where it was quiet, or else with the sound. */
  #commit(item) {
    if (this.#speaking !== item) this.#begin(item, this.#turnEndS);
    if (this.#resolve) this.#turnEndS = Math.max(this.#turnEndS, this.#sentS);
    this.#numOpen += 1;
    this.#handlers.turnEnded(item, this.#turnEndS);
  }

  #say(item, text) {
    this.#texts.set(item, text);
    this.#handlers.text(item, text);
  }
}
