/** Images and PDFs for the next message: chosen, pasted or dropped, and uploaded immediately. */

import { el, icon, tool } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { sendFile } from "./server.js";

export class Attachments extends EventTarget {
  #list;
  #input;
  #button;
  #problem;
  #handlers;
  #pictures = []; // {item, isDocument, image: {id, name, kind?} once it is uploaded}

  /**
   * `root` has the list, the button and the line for what's in the way. `handlers`: `upload()` gives the address
   * to upload to, `picture(id)` that of a picture, `models()` the models that will be asked, `say(text)`.
   */
  constructor(root, input, handlers) {
    super();
    this.#list = root.querySelector(".pictures");
    this.#button = root.querySelector(".attach");
    this.#problem = root.querySelector(".attachments-problem");
    this.#input = input;
    this.#handlers = handlers;
    this.#button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = ""; // the same file can be chosen again
    });
  }

  /** The uploaded files in the format of a turn. */
  get images() {
    return this.#pictures.map(({ image }) => image).filter(Boolean);
  }

  get empty() {
    return this.#pictures.length === 0;
  }

  /** The reason why they can't be sent now, or "". */
  get problem() {
    if (this.empty) return "";
    const blind = this.#blind();
    if (blind && this.#pictures.some(({ isDocument }) => !isDocument)) {
      return `${blind.id} takes no pictures. Remove them, or choose another model.`;
    }
    return this.#pictures.some(({ image }) => !image) ? "Uploading…" : "";
  }

  /** Upload files: images if the model accepts them, and PDFs, of which every model gets at least the text. */
  add(files) {
    const pictures = files.filter(({ type }) => type.startsWith("image/"));
    const documents = files.filter(isPdf);
    const blind = this.#blind();
    if (pictures.length + documents.length < files.length) this.#handlers.say("Only pictures and PDFs can be attached.");
    else if (blind && pictures.length) this.#handlers.say(`${blind.id} takes no pictures.`);
    const limit = Math.min(...this.#handlers.models().map((model) => model.max_images ?? Infinity));
    const numAttached = this.#pictures.filter(({ isDocument }) => !isDocument).length;
    const accepted = pictures.slice(0, Math.max(0, limit - numAttached));
    if (!blind && accepted.length < pictures.length) this.#handlers.say(`At most ${plural(limit, "picture")} can be sent at once.`);
    for (const file of [...accepted, ...documents]) this.#upload(file);
  }

  /** Clear the attachments after sending. */
  clear() {
    this.#pictures = [];
    this.#list.replaceChildren();
    this.changed();
  }

  /** Update after another model was chosen, or when its accepted inputs become known. */
  changed() {
    const blind = this.#blind();
    const label = blind ? "Attach PDFs" : "Attach pictures or PDFs";
    this.#input.accept = blind ? "application/pdf" : "image/*,application/pdf";
    this.#button.title = blind ? `${label}: ${blind.id} takes no pictures` : label;
    this.#button.setAttribute("aria-label", label);
    this.#list.hidden = this.empty;
    this.#problem.textContent = this.problem;
    this.#problem.hidden = !this.problem;
    this.dispatchEvent(new Event("changed"));
  }

  #blind() {
    return this.#handlers.models().find((model) => model.max_images === 0);
  }

  async #upload(file) {
    const item = el("li", { class: "picture", "aria-busy": "true" }, el("span", { class: "picture-name" }, file.name));
    const picture = { item, isDocument: isPdf(file), image: null };
    const remove = () => {
      this.#pictures = this.#pictures.filter((attached) => attached !== picture);
      item.remove();
      this.changed();
    };
    item.append(tool("close", `Remove ${file.name}`, remove));
    this.#pictures.push(picture);
    this.#list.append(item);
    this.changed();
    try {
      picture.image = await sendFile(this.#handlers.upload(), file);
      item.setAttribute("aria-busy", "false");
      if (picture.isDocument) item.prepend(icon("file"));
      else item.prepend(el("img", { src: this.#handlers.picture(picture.image.id), alt: file.name }));
      this.changed();
    } catch (error) {
      remove();
      this.#handlers.say(`${file.name} can't be attached: ${error.message}`);
    }
  }
}

function isPdf({ type, name }) {
  return type === "application/pdf" || name.toLowerCase().endsWith(".pdf");
}
