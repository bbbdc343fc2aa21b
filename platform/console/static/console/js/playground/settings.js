/**
 * The sampling settings: a form that is validated as the user types. The ranges are attributes of its
 * fields, which the server takes from the engine. An empty field isn't sent, so that the model's
 * default applies.
 */

const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };

export class Settings {
  #form;
  #onChange;

  /** `raw`: the fields' texts by name when the page was left. */
  constructor(form, raw, onChange) {
    this.#form = form;
    this.#onChange = onChange;
    for (const range of form.querySelectorAll("input[type=range]")) this.#link(range);
    form.addEventListener("input", (event) => this.#changed(event.target));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show(raw);
  }

  /** Put these values into the fields. */
  show(raw) {
    for (const input of this.#inputs()) {
      input.value = raw[input.name] ?? "";
      this.#followRange(input);
    }
    this.check();
  }

  /** What to send as `sampling`; call `check` first. */
  sampling() {
    const values = {};
    for (const input of this.#inputs()) {
      const value = parse(input);
      if (value !== undefined) values[input.name] = value;
    }
    return values;
  }

  /** Return the first invalid field, or null; all invalid ones are marked. */
  check() {
    let first = null;
    for (const input of this.#inputs()) {
      const problem = problemOf(input);
      mark(input, problem);
      if (problem) first ??= input;
    }
    return first;
  }

  /** Whether there is a field with this name. */
  has(name) {
    return Boolean(this.#input(name));
  }

  /** Mark the field that the server rejected, if it is in this form. */
  blame(name, message) {
    const input = this.#input(name);
    if (input) mark(input, message);
  }

  /** Focus a field. */
  focus(name) {
    this.#input(name)?.focus();
  }

  #inputs() {
    return [...this.#form.querySelectorAll("[data-kind]")];
  }

  #input(name) {
    return this.#inputs().find((input) => input.name === name);
  }

  #changed(target) {
    if (!target.dataset.kind) return; // a slider, which acts through its field
    mark(target, problemOf(target));
    this.#followRange(target);
    const raw = {};
    for (const input of this.#inputs()) if (input.value) raw[input.name] = input.value;
    this.#onChange(raw);
  }

  #link(range) {
    const field = this.#form.elements[range.dataset.for];
    range.addEventListener("input", () => {
      field.value = range.value;
      this.#changed(field);
    });
    this.#followRange(field);
  }

  /** Move the slider to the field's value, or dim it at the usual value. */
  #followRange(field) {
    const range = this.#form.querySelector(`input[type=range][data-for="${field.name}"]`);
    if (!range) return;
    range.value = field.value === "" ? range.dataset.rest : field.value;
    range.classList.toggle("at-rest", field.value === "");
  }
}

function parse(input) {
  if (input.dataset.kind === "strings") return parseStrings(input.value);
  return input.value.trim() === "" ? undefined : Number(input.value);
}

/** Parse one string per line; \n, \t and \\ are escapes as in code. */
function parseStrings(text) {
  const strings = text.split("\n").filter((line) => line !== "");
  if (strings.length === 0) return undefined;
  return strings.map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]));
}

function problemOf(input) {
  const { kind } = input.dataset;
  if (kind === "strings") return problemOfStrings(input);
  // A number field reports invalid input as empty, with the badInput flag.
  if (input.validity.badInput) return "This is not a number.";
  const text = input.value.trim();
  if (text === "") return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return "This is not a number.";
  if (kind === "integer" && !Number.isInteger(value)) return "Must be a whole number.";
  const { low, high, open } = input.dataset;
  if (low !== undefined && (value < low || (open && value === Number(low)))) {
    return open ? `Must be over ${low}.` : `Must be at least ${low}.`;
  }
  if (high !== undefined && value > Number(high)) return `Must be at most ${high}.`;
  return "";
}

function problemOfStrings(input) {
  const strings = parseStrings(input.value) ?? [];
  const { most: limit, chars } = input.dataset;
  if (strings.length > limit) return `At most ${limit} strings.`;
  if (strings.some((text) => text.length > chars)) return `At most ${chars} characters each.`;
  return "";
}

function mark(input, problem) {
  const slot = document.getElementById(`${input.id}-error`);
  slot.textContent = problem;
  slot.hidden = !problem;
  input.setAttribute("aria-invalid", problem ? "true" : "false");
}
