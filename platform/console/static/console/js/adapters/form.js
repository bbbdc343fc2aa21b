/** The form of an upload: its files, their progress, and the result. */

import { byId, el } from "../lib/dom.js";
import { percent, size } from "../lib/format.js";
import { dropped } from "./dropped.js";
import { Stopped, Upload } from "./upload.js";

const NEEDED = ["adapter_config.json", "adapter_model.safetensors"];
const ADAPTER_FILES = [
  ...NEEDED,
  "new_embeddings.safetensors",
  "tokenizer.json",
  "added_tokens.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
  "chat_template.json",
];
const SINGLE_FILE = /\.(gguf|zip)$/i;

export class UploadForm {
  #form;
  #files = [];
  #upload = null;

  constructor(form) {
    this.#form = form;
    form.hidden = false;
    byId("upload-files").addEventListener("change", (event) => this.#choose(event.target.files));
    byId("upload-stop").addEventListener("click", () => this.#upload?.stop());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    this.#listenForDrops(byId("drop"));
    addEventListener("beforeunload", (event) => this.busy && event.preventDefault());
  }

  get busy() {
    return this.#upload !== null || this.#files.length > 0;
  }

  #listenForDrops(target) {
    for (const [event, isHovered] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      target.addEventListener(event, (drag) => {
        drag.preventDefault();
        target.classList.toggle("over", isHovered);
        if (event === "drop") dropped(drag.dataTransfer).then((files) => this.#choose(files));
      });
    }
  }

  /** Select the files of a folder that belong to an adapter. */
  #choose(list) {
    const files = [...list];
    const single = files.find((file) => SINGLE_FILE.test(file.name));
    const pair = files.filter((file) => ADAPTER_FILES.includes(file.name));
    const chosen = pair.some((file) => NEEDED.includes(file.name)) ? pair : single ? [single] : files;
    const several = new Set(chosen.map((file) => file.name)).size < chosen.length;
    this.#files = several ? [] : chosen;
    byId("chosen").replaceChildren(
      ...this.#files.map((file) => el("li", {}, file.name, el("span", {}, size(file.size)))),
    );
    if (several) this.#tell("That is more than one adapter: upload one at a time.", "error");
    else this.#tell("");
  }

  async #start() {
    if (this.#upload) return;
    if (!this.#files.length) return this.#tell("Choose the files first.", "error");
    const fields = new FormData(this.#form);
    this.#upload = new Upload(this.#form.dataset.api, fields.get("csrfmiddlewaretoken"));
    this.#show(true);
    try {
      const version = await this.#upload.run(
        {
          name: fields.get("name").trim(),
          model: fields.get("model"),
          promote: fields.get("promote") !== null,
        },
        this.#files,
        (done, waiting) => this.#progress(done, waiting),
      );
      this.#files = [];
      byId("chosen").replaceChildren();
      this.#tell(`Version ${version.number} is uploaded. It is checked now.`);
      setTimeout(() => location.replace(location.href), 600);
    } catch (error) {
      this.#fail(error);
    } finally {
      this.#upload = null;
      this.#show(false);
    }
  }

  #fail(error) {
    if (error instanceof Stopped) return this.#tell("The upload was cancelled.");
    if (error.code === "recent_authentication_required") {
      const link = el("a", { href: this.#form.dataset.again }, "Prove who you are");
      byId("upload-status").replaceChildren(link, ", then upload it again.");
      return undefined;
    }
    return this.#tell(error.message, "error");
  }

  #progress(done, waiting) {
    byId("upload-progress").value = done;
    this.#tell(waiting ? "The connection was lost. The upload resumes soon." : percent(done));
  }

  #show(running) {
    byId("upload-progress").hidden = !running;
    byId("upload-stop").hidden = !running;
    byId("upload-start").disabled = running;
  }

  #tell(text, kind = "") {
    byId("upload-status").textContent = text;
    byId("upload-status").dataset.kind = kind;
  }
}
