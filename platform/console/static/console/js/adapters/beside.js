/** One question to the base and to its adapter, over the playground's socket. */

const form = document.getElementById("beside");

class Beside {
  #form;
  #places;
  #socket = null;

  constructor(form) {
    this.#form = form;
    this.#places = Object.fromEntries(
      [...form.querySelectorAll("[data-answer]")].map((place) => [place.dataset.answer, place]),
    );
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
  }

  #ask() {
    this.#socket?.close();
    const { socket: path, tenant, base, adapterName } = this.#form.dataset;
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}${path}`);
    this.#socket = socket;
    const content = this.#form.querySelector("textarea").value;
    const open = new Set(Object.keys(this.#places));
    for (const place of Object.values(this.#places)) place.textContent = "…";
    socket.addEventListener("open", () => {
      for (const [id, model] of [["base", base], ["adapter", adapterName]]) {
        const messages = [{ role: "user", content }];
        const sampling = { temperature: 0, max_tokens: 300 };
        socket.send(JSON.stringify({ type: "generate", id, model, tenant, messages, sampling }));
      }
    });
    const begun = new Set();
    socket.addEventListener("message", ({ data }) => {
      const frame = JSON.parse(data);
      const place = this.#places[frame.id];
      if (!place) return;
      if (frame.type === "delta") {
        place.textContent = (begun.has(frame.id) ? place.textContent : "") + frame.text;
        begun.add(frame.id);
      }
      if (frame.type === "error") place.textContent = frame.error.message;
      if (frame.type === "done" || frame.type === "error") open.delete(frame.id);
      if (open.size === 0) socket.close();
    });
    socket.addEventListener("close", () => {
      for (const id of open) this.#places[id].textContent += " (The connection was lost.)";
      open.clear();
    });
  }
}

if (form) new Beside(form);
