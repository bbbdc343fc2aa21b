/** Keeps the end of a scrolling element in view, unless the reader scrolled away from it. */

const NEAR = 56;

export class Follower {
  following = true;
  #scroller;
  #onChange;

  constructor(scroller, onChange) {
    this.#scroller = scroller;
    this.#onChange = onChange;
    scroller.addEventListener("scroll", () => this.#set(this.#distance() < NEAR), { passive: true });
    // A wheel turned up means "let me read", even if the next token comes before it has moved far.
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), {
      passive: true,
    });
  }

  /** To the end if the reader is there; call after each change of the content. */
  keep() {
    if (this.following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
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
