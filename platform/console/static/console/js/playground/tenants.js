/**
 * The tenant of the playground's requests: it determines models, limits and billing. A select if the
 * user belongs to several, stored in localStorage under a key of the user; otherwise a line of text.
 */

import { el } from "../lib/dom.js";

const PREFIX = "quire.tenant.";

export class Tenants {
  #select;
  #line;
  #key;
  #value;
  #listed = "";

  /** `linked`: the tenant of a link, used only once. `onChange()`: the user chose another one. */
  constructor(select, line, reader, linked, onChange) {
    this.#select = select;
    this.#line = line;
    this.#key = PREFIX + reader;
    this.#value = linked ?? this.#stored();
    select.addEventListener("change", () => {
      this.#value = select.value;
      this.#keep();
      onChange();
    });
  }

  /** The tenant's slug; "" before the server has named one. */
  get value() {
    return this.#value;
  }

  /** A URL that includes the tenant. */
  address(url) {
    return this.#value ? `${url}?tenant=${encodeURIComponent(this.#value)}` : url;
  }

  /** `tenants`: [{id, name}] to choose from. `current`: the one that the server used, or null. */
  update(tenants, current) {
    this.#value = current ?? "";
    const several = tenants.length > 1;
    this.#select.parentElement.hidden = !several;
    this.#line.textContent = current && !several ? `Usage counts towards ${current}` : "";
    const listed = JSON.stringify(tenants);
    if (listed !== this.#listed) {
      // Don't rebuild the list while it is open.
      this.#listed = listed;
      this.#select.replaceChildren(...tenants.map(({ id, name }) => el("option", { value: id }, name)));
    }
    this.#select.value = this.#value;
  }

  #stored() {
    try {
      return localStorage.getItem(this.#key) ?? "";
    } catch {
      return ""; // storage is blocked: the server uses the first tenant
    }
  }

  #keep() {
    try {
      localStorage.setItem(this.#key, this.#value);
    } catch (error) {
      console.warn("The tenant can't be kept:", error);
    }
  }
}
