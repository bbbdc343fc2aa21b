/** JSON to and from this server, with the session. */

/** The answer's JSON. Throws an Error with the server's message and `code`. */
export function send(method, url, body) {
  if (body === undefined) return request(method, url);
  return request(method, url, JSON.stringify(body), { "Content-Type": "application/json" });
}

/** The same of a file, sent as the field `file` of a form. */
export function sendFile(url, file) {
  const form = new FormData();
  form.append("file", file);
  return request("POST", url, form);
}

async function request(method, url, body, headers = {}) {
  const token = document.querySelector("[name=csrfmiddlewaretoken]")?.value ?? "";
  const response = await fetch(url, {
    method,
    headers: { Accept: "application/json", "X-CSRFToken": token, ...headers },
    body,
  });
  let data;
  try {
    data = await response.json();
  } catch {
    throw new Error(`The server answered with HTTP ${response.status}.`);
  }
  if (!response.ok) throw Object.assign(new Error(data.error?.message), { code: data.error?.code });
  return data;
}
