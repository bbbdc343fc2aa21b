/** Decides which URLs in a model's output become links: plain http and https without hidden parts. */

const ODD = /[\u0000-\u0020\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\\<>"`]/u;
const MAX_CHARS = 1000;

/**
 * The address as the browser understands it, or null. Refused: every scheme but http and https,
 * relative addresses, control and invisible characters, and user names before the host
 * (`https://bank.example@evil.example/`).
 */
export function safeHref(address) {
  if (address.length > MAX_CHARS || ODD.test(address) || !/^https?:\/\//i.test(address)) return null;
  let url;
  try {
    url = new URL(address);
  } catch {
    return null; // not an address: the caller shows it as text
  }
  const web = url.protocol === "https:" || url.protocol === "http:";
  return web && url.hostname && !url.username && !url.password ? url.href : null;
}
