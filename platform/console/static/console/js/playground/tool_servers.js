/** MCP servers, whose tools run automatically: which ones are enabled, and which tool belongs to which server. */

import { el } from "../lib/dom.js";
import { plural } from "../lib/format.js";

export class ToolServers {
  #root;
  #list;
  #conversation;
  #servers = [];

  /** `root`: a fieldset, visible if the tenant has servers, with an element `[data-list]`. */
  constructor(root, conversation) {
    this.#root = root;
    this.#list = root.querySelector("[data-list]");
    this.#conversation = conversation;
    this.#list.addEventListener("change", ({ target }) => this.#choose(target.value, target.checked));
  }

  /** Replace the servers: [{name, tools: function names}]. Servers that no longer exist are disabled. */
  update(servers) {
    if (JSON.stringify(servers) === JSON.stringify(this.#servers)) return;
    this.#servers = servers;
    const names = servers.map(({ name }) => name);
    const chosen = this.#conversation.servers.filter((name) => names.includes(name));
    if (chosen.length < this.#conversation.servers.length) {
      this.#conversation.servers = chosen;
      this.#conversation.changed();
    }
    this.show();
  }

  /** Set the checkboxes from the conversation. */
  show() {
    this.#root.hidden = this.#servers.length === 0;
    this.#list.replaceChildren(...this.#servers.map((server) => this.#box(server)));
  }

  /** Return the parameters to add to a request. */
  request() {
    const { servers } = this.#conversation;
    return servers.length ? { mcp_servers: servers } : {};
  }

  /** Return the server that runs a function, or undefined. */
  serverOf(name) {
    const { servers } = this.#conversation;
    return this.#servers.find((server) => servers.includes(server.name) && server.tools.includes(name))?.name;
  }

  #box({ name, tools }) {
    const input = el("input", { type: "checkbox", value: name, checked: this.#conversation.servers.includes(name), disabled: tools.length === 0, autocomplete: "off" });
    const count = tools.length ? plural(tools.length, "tool") : "no tools yet";
    return el("label", { class: "check", title: tools.join(", ") }, input, ` ${name}, ${count}`);
  }

  #choose(name, on) {
    const remaining = this.#conversation.servers.filter((server) => server !== name);
    this.#conversation.servers = on ? [...remaining, name] : remaining;
    this.#conversation.changed();
  }
}
