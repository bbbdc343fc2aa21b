/** An HTTP request as a program, with the key from the environment. */

/** `request`: {method, url, body}; `body`: JSON as text, undefined for none. By name of the language. */
export const HTTP_SNIPPETS = { Python: python, JavaScript: javascript };

function python({ method, url, body }) {
  const json = body === undefined ? "" : `\n    content='''${body.replaceAll("\\", "\\\\").replaceAll("'''", "\\'\\'\\'")}''',`;
  const type = body === undefined ? "" : `,\n        "Content-Type": "application/json"`;
  return `import os
import httpx

response = httpx.request(
    "${method}",
    ${JSON.stringify(url)},
    headers={
        "Authorization": f"Bearer {os.environ['QUIRE_API_KEY']}"${type},
    },${json}
    timeout=600,
)
response.raise_for_status()
print(response.text)`;
}

function javascript({ method, url, body }) {
  const json = body === undefined ? "" : `\n  body: JSON.stringify(${body.replaceAll("\n", "\n  ")}),`;
  const type = body === undefined ? "" : `,\n    "Content-Type": "application/json"`;
  return `const response = await fetch(${JSON.stringify(url)}, {
  method: "${method}",
  headers: {
    Authorization: \`Bearer \${process.env.QUIRE_API_KEY}\`${type},
  },${json}
});
if (!response.ok) throw new Error(await response.text());
console.log(await response.text());`;
}
