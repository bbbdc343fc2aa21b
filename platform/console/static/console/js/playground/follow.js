/**
 * Keeps the end of a scrolling element in view, unless the reader scrolled away from it.
 *
 * Content grows after it was drawn too: formulas, fonts, pictures. Sizes are therefore watched, and
 * only the reader's own input ends the following: a `scroll` event alone may come of a layout.
 */

const NEAR = 56;
const UP = new Set(["ArrowUp", "PageUp", "Home"]);

export class Follower {
  following = true;
  #scroller;
  #onChange;
  #last = 0; // scrollTop

  /** `content`: the element in `scroller` that grows. */
  constructor(scroller, content, onChange) {
    this.#scroller = scroller;
    this.#onChange = onChange;
    const sizes = new ResizeObserver(() => this.keep());
    sizes.observe(scroller);
    sizes.observe(content);
    let touched = false;
    scroller.addEventListener("scroll", () => {
      // On the way up, and in an event that `keep` caused, the end may still be near.
      const down = scroller.scrollTop > this.#last;
      this.#last = scroller.scrollTop;
      if (this.#distance() < NEAR) {
        if (down) this.#set(true);
      } else if (touched) this.#set(false);
    }, { passive: true });
    // A wheel turned up means "let me read", even if the next token comes before it has moved far.
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), { passive: true });
    scroller.addEventListener("keydown", (event) => UP.has(event.key) && !event.target.matches("input, textarea") && this.#leave());
    // A scroll bar that is dragged, and a finger.
    scroller.addEventListener("pointerdown", () => (touched = true), { passive: true });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => (touched = false), { passive: true });
    scroller.addEventListener("touchmove", () => this.#distance() >= NEAR && this.#leave(), { passive: true });
  }

  /** To the end if the reader is there. */
  keep() {
    if (!this.following) return;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#last = this.#scroller.scrollTop;
  }

  /** To the end in any case. */
  toEnd() {
    this.#set(true);
    this.keep();
  }

  #leave() {
    if (this.#scroller.scrollHeight > this.#scroller.clientHeight) this.#set(false);
  }

  #distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  #set(following) {
    if (this.following === following) return;
    this.following = following;
    this.#onChange(following);
  }
}
