/** Colours of cells by the chosen attribute, from the theme's palette. */

const NAMES = ["--lapis", "--verdigris", "--ochre", "--rubric"];
const OLD_S = 60;

/** Read the page's current colours, which depend on the theme. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    free: of("--hover"),
    kept: of("--rule-strong"),
    evicted: of("--madder"),
    edge: of("--ink"),
    pigments: NAMES.map(of),
    ramp: [of("--lapis-wash"), of("--lapis"), of("--ochre"), of("--rubric")],
  };
}

/** Assigns the next palette colour to each new name, and then hues that are far apart. */
export class Names {
  #indexes = new Map();

  colour(name, colours) {
    let index = this.#indexes.get(name);
    if (index === undefined) {
      if (this.#indexes.size > 5000) this.#indexes.clear();
      index = this.#indexes.size;
      this.#indexes.set(name, index);
    }
    const { pigments } = colours;
    return index < pigments.length ? pigments[index] : `hsl(${(index * 137.5) % 360} 45% 50%)`;
  }

  /** The first few names with their colours. */
  list(colours, names, limit = 12) {
    return [...names].slice(0, limit).map((name) => [name, this.colour(name, colours)]);
  }
}

/** The colour of a cell. */
export function colourOf(cells, cell, by, names, colours, now) {
  const used = cells.refs[cell] > 0;
  if (!used && !cells.cached[cell]) return colours.free;
  if (by === "refs") return used ? colours.ramp[Math.min(3, cells.refs[cell])] : colours.kept;
  if (by === "age") {
    const part = Math.min(1, (now - cells.changed[cell]) / 1000 / OLD_S);
    return colours.ramp[3 - Math.floor(part * 3.999)];
  }
  if (by === "request") return used && cells.users[cell] ? names.colour(cells.users[cell][0], colours) : colours.kept;
  const name = by === "adapter" ? cells.adapter[cell] || "the base model" : cells.owner[cell];
  return name ? names.colour(name, colours) : colours.free;
}
