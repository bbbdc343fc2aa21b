/** Uploads a file in chunks; after a lost connection, resumes at the server's offset. */

const CHUNK_BYTES = 8 * 1024 * 1024;
const PATIENCE = 8;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The user cancelled the upload. */
export class Stopped extends Error {}

/** The server refused the upload; has its error code. */
class Refused extends Error {
  constructor({ message, code } = {}) {
    super(message ?? "The server refused it.");
    this.code = code;
  }
}

export class Upload {
  #api;
  #token;
  #aborter = new AbortController();
  #id = null;
  #failures = 0;

  constructor(api, token) {
    this.#api = api;
    this.#token = token;
  }

  stop() {
    this.#aborter.abort();
  }

  /** Upload everything; return the new version. `progress(fraction, waiting)` is called repeatedly. */
  async run(about, files, progress) {
    try {
      return await this.#run(about, files, progress);
    } catch (error) {
      await this.#giveUp();
      throw this.#aborter.signal.aborted ? new Stopped() : error;
    }
  }

  async #run(about, files, progress) {
    const sizes = Object.fromEntries(files.map((file) => [file.name, file.size]));
    const upload = await this.#ask("POST", "", JSON.stringify({ ...about, files: sizes }));
    this.#id = upload.id;
    const total = files.reduce((sum, file) => sum + file.size, 0);
    let doneBytes = 0;
    for (const file of files) {
      await this.#send(file, (sent, waiting) => progress((doneBytes + sent) / total, waiting));
      doneBytes += file.size;
    }
    const version = await this.#ask("POST", `${this.#id}/finish/`);
    this.#id = null;
    return version;
  }

  async #send(file, progress) {
    let offset = 0;
    while (offset < file.size) {
      try {
        offset = await this.#sendChunk(file, offset);
        this.#failures = 0;
        progress(offset, false);
      } catch (error) {
        if (error instanceof Refused || this.#aborter.signal.aborted) throw error;
        this.#failures += 1;
        if (this.#failures > PATIENCE) throw error;
        progress(offset, true);
        await pause(Math.min(15_000, 500 * 2 ** this.#failures));
        offset = await this.#storedOffset(file, offset);
      }
    }
  }

  async #sendChunk(file, offset) {
    const path = `${this.#id}/files/${encodeURIComponent(file.name)}/`;
    const answer = await this.#fetch("PATCH", path, file.slice(offset, offset + CHUNK_BYTES), {
      "Content-Type": "application/octet-stream",
      "Upload-Offset": String(offset),
    });
    const offsetHeader = answer.headers.get("Upload-Offset");
    if (answer.status === 409 && offsetHeader !== null) return Number(offsetHeader);
    return (await this.#read(answer)).files[file.name].offset;
  }

  /** The file's offset on the server, or the last known one while the server can't be reached. */
  async #storedOffset(file, offset) {
    try {
      return (await this.#ask("GET", `${this.#id}/`)).files[file.name].offset;
    } catch (error) {
      if (error instanceof Refused) throw error;
      return offset;
    }
  }

  async #giveUp() {
    if (this.#id === null) return;
    const headers = { "X-CSRFToken": this.#token };
    await fetch(`${this.#api}${this.#id}/`, { method: "DELETE", headers }).catch(() => undefined);
  }

  async #ask(method, path, body) {
    const type = body === undefined ? {} : { "Content-Type": "application/json" };
    return this.#read(await this.#fetch(method, path, body, type));
  }

  #fetch(method, path, body, headers) {
    return fetch(`${this.#api}${path}`, {
      method,
      body,
      headers: { Accept: "application/json", "X-CSRFToken": this.#token, ...headers },
      signal: this.#aborter.signal,
    });
  }

  /** Parse a response's JSON. A 5xx can be retried; any other error is final. */
  async #read(answer) {
    if (answer.status >= 500) throw new Error(`The server failed (HTTP ${answer.status}).`);
    const data = await answer.json();
    if (!answer.ok) throw new Refused(data.error);
    return data;
  }
}
