/** JSON to and from this server, with the session. */

/**
 * The answer's JSON. `options`: `fetch`'s `signal` and `keepalive`. Throws an Error with the server's message and
 * `code`, an AbortError by the signal.
 */
export async function send(method, url, body, options) {
  return parse(await sendJson(method, url, body, options));
}

/** Objects of a server-sent stream, until its `[DONE]`. Throws as `send`, in mid-stream too. */
export async function* stream(url, body, signal) {
  const response = await sendJson("POST", url, body, { signal });
  if (!response.ok) await parse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((text) => text.startsWith("data: "));
      if (!line) continue; // a comment that keeps the connection open
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice("data: ".length));
      if (data.error) throw errorFrom(data);
      yield data;
    }
  }
  throw new Error("The connection was lost before the answer's end.");
}

/** The answer's JSON to a file, sent as the field `file` of a form. Throws as `send`. */
export function sendFile(url, file) {
  return sendForm(url, { file });
}

/** The answer's JSON to a form of these fields; empty ones aren't sent. Throws as `send`. */
export async function sendForm(url, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value) form.append(name, value);
  return parse(await request("POST", url, form));
}

function sendJson(method, url, body, options) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  return request(method, url, JSON.stringify(body), headers, options);
}

function request(method, url, body, headers = {}, options = {}) {
  const token = document.querySelector("[name=csrfmiddlewaretoken]")?.value ?? "";
  return fetch(url, {
    method,
    headers: { Accept: "application/json", "X-CSRFToken": token, ...headers },
    body,
    ...options,
  });
}

async function parse(response) {
  let data;
  try {
    data = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server answered with HTTP ${response.status}.`);
  }
  if (!response.ok) throw errorFrom(data);
  return data;
}

function errorFrom({ error }) {
  return Object.assign(new Error(error?.message), { code: error?.code });
}
