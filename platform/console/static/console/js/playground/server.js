/** JSON to and from this server, with the session. */

/** The answer's JSON. Throws an Error with the server's message and `code`. */
export async function send(method, url, body) {
  const token = document.querySelector("[name=csrfmiddlewaretoken]")?.value ?? "";
  const headers = { Accept: "application/json", "X-CSRFToken": token };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(url, { method, headers, body: body && JSON.stringify(body) });
  let data;
  try {
    data = await response.json();
  } catch {
    throw new Error(`The server answered with HTTP ${response.status}.`);
  }
  if (!response.ok) throw Object.assign(new Error(data.error?.message), { code: data.error?.code });
  return data;
}
