/**
 * Keeps the end of a scrolling element in view unless the user scrolls away from it.
 *
 * Content also grows after it was drawn: formulas, fonts, images. Sizes are therefore observed, and
 * only user input stops the following, because a `scroll` event may also result from a layout change.
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
      // While the user scrolls up, or in an event caused by `keep`, the end may still be near.
      const down = scroller.scrollTop > this.#last;
      this.#last = scroller.scrollTop;
      if (this.#distance() < NEAR) {
        if (down) this.#set(true);
      } else if (touched) this.#set(false);
    }, { passive: true });
    // Scrolling up with the wheel stops the following, even if the next token arrives before it has moved far.
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), { passive: true });
    scroller.addEventListener("keydown", (event) => UP.has(event.key) && !event.target.matches("input, textarea") && this.#leave());
    // Dragging the scroll bar, and touch.
    scroller.addEventListener("pointerdown", () => (touched = true), { passive: true });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => (touched = false), { passive: true });
    scroller.addEventListener("touchmove", () => this.#distance() >= NEAR && this.#leave(), { passive: true });
  }

  /** Scroll to the end if the user is there. */
  keep() {
    if (!this.following) return;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#last = this.#scroller.scrollTop;
  }

  /** Scroll to the end in any case. */
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
