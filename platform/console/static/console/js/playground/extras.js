/** Parameters of a request other than sampling: tools, a response schema, log probabilities. */

const NAME = /^[\w-]{1,64}$/;

export class Extras {
  #conversation;
  #fields;

  /** `root` has the textareas `tools` and `schema`, and the checkbox `probabilities`. */
  constructor(root, conversation) {
    this.#conversation = conversation;
    this.#fields = Object.fromEntries(
      ["tools", "schema", "probabilities"].map((name) => [name, root.querySelector(`[name=${name}]`)]),
    );
    this.show();
    root.addEventListener("input", () => this.#changed());
  }

  /** Fill the fields from the conversation. */
  show() {
    const { tools, schema, probabilities } = this.#fields;
    tools.value = this.#conversation.tools;
    schema.value = this.#conversation.schema;
    probabilities.checked = this.#conversation.settings.probabilities === "yes";
    this.check();
  }

  /** Return the parameters to add to a request; call `check` first. */
  request() {
    const { tools, schema } = this.#conversation;
    return {
      ...(tools.trim() && { tools: toolList(tools) }),
      ...(schema.trim() && {
        response_format: {
          type: "json_schema",
          json_schema: { name: "answer", schema: JSON.parse(schema), strict: true },
        },
      }),
    };
  }

  /** Return the parameters to add to its sampling. */
  sampling() {
    const isEnabled = this.#conversation.settings.probabilities === "yes";
    return isEnabled ? { logprobs: true, top_logprobs: 5 } : {};
  }

  /** Return the first invalid field, or null; all invalid ones are marked. */
  check() {
    let first = null;
    for (const name of ["tools", "schema"]) {
      const input = this.#fields[name];
      const problem = input.value.trim() ? problemOf(name, input.value) : "";
      const slot = document.getElementById(`${input.id}-error`);
      slot.textContent = problem;
      slot.hidden = !problem;
      input.setAttribute("aria-invalid", problem ? "true" : "false");
      if (problem) first ??= input;
    }
    return first;
  }

  #changed() {
    const conversation = this.#conversation;
    conversation.tools = this.#fields.tools.value;
    conversation.schema = this.#fields.schema.value;
    const { probabilities: _, ...rest } = conversation.settings;
    conversation.settings = this.#fields.probabilities.checked ? { ...rest, probabilities: "yes" } : rest;
    this.check();
    conversation.changed();
  }
}

function problemOf(name, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
  if (name === "schema") {
    const object = value && typeof value === "object" && !Array.isArray(value);
    return object ? "" : "A JSON schema is an object, such as {\"type\": \"object\"}.";
  }
  for (const entry of Array.isArray(value) ? value : [value]) {
    const tool = entry?.function ?? entry;
    if (!NAME.test(tool?.name ?? "")) return "Each tool needs a name of letters, digits, _ and -.";
    if (tool.parameters !== undefined && typeof tool.parameters !== "object") {
      return `The parameters of ${tool.name} must be a JSON schema.`;
    }
  }
  return "";
}

/** Convert to OpenAI's format; bare functions are accepted too. */
function toolList(text) {
  const value = JSON.parse(text);
  return (Array.isArray(value) ? value : [value]).map((entry) =>
    entry.function ? entry : { type: "function", function: entry },
  );
}
