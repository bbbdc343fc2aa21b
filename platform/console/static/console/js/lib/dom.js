/** Creates elements node by node: no page of the console ever parses markup from a string. */

const SVG = "http://www.w3.org/2000/svg";
const SPRITE = new URL("../../icons.svg", import.meta.url).pathname;

/**
 * Create an element. `props`: `class`, `on: {event: listener}`, `dataset: {...}`; properties of the element
 * by name; all others become attributes. Strings among the children become text.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "on") listen(node, value);
    else if (name in node && !name.startsWith("aria")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function listen(node, listeners) {
  for (const [event, listener] of Object.entries(listeners)) node.addEventListener(event, listener);
}

/** Create an SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Create an icon of `icons.svg`. It is decorative, so the button around it needs a label. */
export function icon(name) {
  const use = svg("use", { href: `${SPRITE}#${name}` });
  return svg("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/** Create a button with an icon and an accessible name. */
export function tool(iconName, label, onClick, { text = "" } = {}) {
  const name = text ? {} : { "aria-label": label };
  return el(
    "button",
    { type: "button", class: "tool", title: label, ...name, on: { click: onClick } },
    icon(iconName),
    text || null,
  );
}

/** The element with this id; throws at once if the page lacks it. */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`The page has no #${id}.`);
  return node;
}
