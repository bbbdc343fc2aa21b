/** A page that calls one endpoint with the session: completions, embeddings or reranking. */

import { byId, el } from "../lib/dom.js";
import { count, duration, plural, rate } from "../lib/format.js";
import { HTTP_SNIPPETS } from "../lib/http_snippets.js";
import { ROOT } from "../lib/root.js";
import { send, stream } from "./server.js";
import { listModels } from "./tab_models.js";

const VECTOR_VALUES = 6; // shown of each vector
const MIN_RATED_TOKENS = 10; // fewer arrive in a message or two: their rate means nothing
const MAX_COMPARED = 16; // texts with a column, because the table grows with their number

const form = byId("run");
const { kind, runUrl, apiPath } = form.dataset;
const { model } = form.elements;
const button = form.querySelector("[type=submit]");
const stop = byId("run-stop");
const state = byId("run-state");

function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/** By kind: the body of a request, and elements that show its answer; completions come as a stream. */
const KINDS = {
  completions: {
    body: ({ prompt, max_tokens: tokens, temperature }) => ({
      prompt: prompt.value,
      max_tokens: Number(tokens.value),
      temperature: Number(temperature.value),
    }),
    run: streamCompletion,
  },
  embeddings: {
    body: ({ input }) => ({ input: lines(input.value) }),
    show: ({ data }, { input }) => {
      const vectors = data.map(({ embedding }) => embedding);
      const compared = input.length > 1 ? vectors.slice(0, MAX_COMPARED) : [];
      const head = ["Text", "Dimensions", "First values", ...compared.map((_, index) => `Like ${index + 1}`)];
      const rows = input.map((text, index) => [
        `${index + 1}. ${text}`,
        count(vectors[index].length),
        vectors[index].slice(0, VECTOR_VALUES).map((value) => value.toFixed(3)).join(", "),
        ...compared.map((other) => cosine(vectors[index], other).toFixed(3)),
      ]);
      const title = input.length > MAX_COMPARED ? `Vectors, compared with the first ${MAX_COMPARED} (cosine)` : "Vectors, and how alike they are (cosine)";
      return [table(title, head, rows)];
    },
  },
  rerank: {
    body: ({ query, documents }) => ({ query: query.value, documents: lines(documents.value) }),
    show: ({ results }, { documents }) => [
      table(
        "Documents, the best first",
        ["Document", "Score"],
        results.map(({ index, relevance_score: score }) => [documents[index], score.toFixed(4)]),
      ),
    ],
  },
};

/** Shows the text while it comes; stopping keeps what has come. Returns the usage, and when the first text came. */
async function streamCompletion(body, signal) {
  const text = el("p", { class: "completion", dir: "auto" }, el("span", { class: "prompt" }, body.prompt));
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  let last = null;
  let firstAt = null;
  for await (const chunk of stream(runUrl, streamed, signal)) {
    if (!last) showAnswer(body, chunk, [text]);
    last = chunk;
    const delta = chunk.choices[0]?.text;
    if (delta) firstAt ??= performance.now();
    text.append(delta ?? "");
  }
  return { usage: last?.usage, firstAt };
}

function cosine(first, second) {
  let [product, a, b] = [0, 0, 0];
  for (const [index, value] of first.entries()) {
    product += value * second[index];
    a += value * value;
    b += second[index] * second[index];
  }
  return a && b ? product / Math.sqrt(a * b) : 0;
}

function table(name, head, rows) {
  const cells = (row) => row.map((text, index) => (index ? el("td", { class: "end" }, text) : el("th", { scope: "row" }, text)));
  return el(
    "div",
    { class: "sheet-scroll", tabIndex: 0, role: "group", "aria-label": name },
    el(
      "table",
      { class: "figures" },
      el("thead", {}, el("tr", {}, ...head.map((text, index) => el("th", { scope: "col", class: index ? "end" : null }, text)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
    ),
  );
}

let running = null;

stop.addEventListener("click", () => running.abort());

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { model: model.value, ...KINDS[kind].body(form.elements) };
  running = new AbortController();
  button.disabled = true;
  stop.hidden = false;
  byId("result").hidden = true;
  byId("result-figures").textContent = "";
  state.textContent = "Running…";
  const startedAt = performance.now();
  try {
    const answer = await (KINDS[kind].run ?? runOnce)(body, running.signal);
    byId("result-figures").textContent = figures(answer, startedAt, performance.now());
    state.textContent = "";
  } catch (error) {
    state.textContent = error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    button.disabled = false;
    if (document.activeElement === stop) button.focus();
    stop.hidden = true;
  }
});

async function runOnce(body, signal) {
  const answer = await send("POST", runUrl, body, { signal });
  showAnswer(body, answer, KINDS[kind].show(answer, body));
  return answer;
}

function showAnswer(body, { id }, elements) {
  byId("result-body").replaceChildren(...elements);
  const request = byId("result-request");
  request.hidden = !id;
  request.href = `${ROOT}console/requests/${encodeURIComponent(id)}/`;
  const url = new URL(ROOT + apiPath.slice(1), location.origin).href;
  byId("result-code").textContent = HTTP_SNIPPETS.Python({ method: "POST", url, body: JSON.stringify(body, null, 2) });
  byId("result").hidden = false;
}

/** What an answer took. Its speed is of the tokens after the first. */
function figures({ usage, firstAt }, startedAt, finishedAt) {
  const parts = [duration(finishedAt - startedAt)];
  if (usage?.prompt_tokens) parts.push(`prompt ${plural(usage.prompt_tokens, "token")}`);
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) parts.push(plural(tokens, "token"));
  if (tokens >= MIN_RATED_TOKENS && finishedAt > firstAt) parts.push(`${rate(((tokens - 1) * 1000) / (finishedAt - firstAt))} tok/s`);
  return parts.join(" · ");
}

listModels(form, (text) => (state.textContent = text), (mayRun) => (button.disabled = !mayRun));
