/** What was just asked, as a program. The key is read from the environment, never written down. */

/** Fields that OpenAI's Python library knows; others go into `extra_body`. */
const SDK_FIELDS = new Set(
  "model messages temperature top_p max_tokens stop presence_penalty frequency_penalty seed logprobs top_logprobs tools tool_choice response_format".split(" "),
);
const OFTEN = 4; // spaces

/** {curl, Python, JavaScript} of a request {model, messages, sampling, tools?, response_format?}. */
export function snippets({ model, messages, sampling, tools, response_format }, base) {
  const body = { model, messages, ...sampling, ...(tools && { tools }), ...(response_format && { response_format }) };
  return { curl: curl(body, base), Python: python(body, base), JavaScript: javascript(body, base) };
}

function curl(body, base) {
  return `curl --no-buffer ${base}/chat/completions \\
  -H "Authorization: Bearer $QUIRE_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d @- <<'JSON'
${JSON.stringify({ ...body, stream: true }, null, 2)}
JSON
`;
}

function python(body, base) {
  const fields = Object.entries(body).filter(([name]) => SDK_FIELDS.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !SDK_FIELDS.has(name)));
  if (Object.keys(extra).length) fields.push(["extra_body", extra]);
  const lines = fields.map(([name, value]) => `    ${name}=${literal(value, OFTEN)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=os.environ["QUIRE_API_KEY"])
stream = client.chat.completions.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        for call in choice.delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="")
print()
`;
}

/** A value as Python writes it. */
function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = " ".repeat(indent + OFTEN);
  const parts = Array.isArray(value)
    ? value.map((item) => literal(item, indent + OFTEN))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, indent + OFTEN)}`);
  if (parts.length === 0) return open + close;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}

function javascript(body, base) {
  return `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(base)}, apiKey: process.env.QUIRE_API_KEY });
const stream = await client.chat.completions.create(${JSON.stringify({ ...body, stream: true }, null, 2)});
for await (const chunk of stream) {
  for (const { delta } of chunk.choices) {
    process.stdout.write(delta.content ?? "");
    for (const call of delta.tool_calls ?? []) {
      process.stdout.write(\`\${call.function?.name ?? ""} \${call.function?.arguments ?? ""}\`);
    }
  }
}
console.log();
`;
}
