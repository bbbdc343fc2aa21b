/** Pictures that go with the next message: chosen, pasted or dropped, and uploaded at once. */

import { el, tool } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { sendFile } from "./server.js";

export class Attachments extends EventTarget {
  #list;
  #input;
  #button;
  #problem;
  #handlers;
  #pictures = []; // {item, image: {id, name} once it is uploaded}

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

  /** The uploaded pictures, as a turn has them. */
  get images() {
    return this.#pictures.map(({ image }) => image).filter(Boolean);
  }

  get empty() {
    return this.#pictures.length === 0;
  }

  /** Why they can't be sent now, or "". */
  get problem() {
    if (this.empty) return "";
    const blind = this.#blind();
    if (blind) return `${blind.id} takes no pictures. Remove them, or choose another model.`;
    return this.#pictures.some(({ image }) => !image) ? "Uploading…" : "";
  }

  /** Upload files. Those that are no pictures are refused, and all where the model takes none. */
  add(files) {
    const pictures = files.filter(({ type }) => type.startsWith("image/"));
    const blind = this.#blind();
    if (blind) this.#handlers.say(`${blind.id} takes no pictures.`);
    else if (pictures.length < files.length) this.#handlers.say("Only pictures can be attached.");
    if (blind) return;
    const limit = Math.min(...this.#handlers.models().map((model) => model.max_images ?? Infinity));
    const taken = pictures.slice(0, Math.max(0, limit - this.#pictures.length));
    if (taken.length < pictures.length) this.#handlers.say(`At most ${plural(limit, "picture")} can be sent at once.`);
    for (const file of taken) this.#upload(file);
  }

  /** They were sent. */
  clear() {
    this.#pictures = [];
    this.#list.replaceChildren();
    this.changed();
  }

  /** Another model was chosen, or it is known what one takes. */
  changed() {
    const blind = this.#blind();
    this.#button.disabled = Boolean(blind);
    this.#button.title = blind ? `${blind.id} takes no pictures` : "Attach pictures";
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
    const picture = { item, image: null };
    const remove = () => {
      this.#pictures = this.#pictures.filter((each) => each !== picture);
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
      item.prepend(el("img", { src: this.#handlers.picture(picture.image.id), alt: file.name }));
      this.changed();
    } catch (error) {
      remove();
      this.#handlers.say(`${file.name} can't be attached: ${error.message}`);
    }
  }
}
