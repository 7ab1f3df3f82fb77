// The log stays at its end until the reader scrolls up, and again once the reader is back there.
//
// What grows (an answer, a question of many lines, the box that it is typed in) moves nothing by itself: only a scroll
// upwards is the reader's own.

const NEAR = 40; // pixels

export class Follower {
  #log;
  #button;
  #following = true;
  #top = 0;

  constructor(log, content, button) {
    this.#log = log;
    this.#button = button;
    log.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    // Who unfolds something wants to read it from its beginning.
    log.addEventListener("click", ({ target }) => target.closest("summary") && (this.#following = false));
    button.addEventListener("click", () => this.toEnd());
    const sizes = new ResizeObserver(() => this.#settle());
    sizes.observe(log);
    sizes.observe(content);
  }

  /** From here on, whatever was read before. */
  toEnd() {
    this.#following = true;
    this.#settle();
  }

  #scrolled() {
    if (this.#atEnd()) this.#following = true;
    else if (this.#log.scrollTop < this.#top - 1) this.#following = false;
    this.#top = this.#log.scrollTop;
    this.#button.hidden = this.#following;
  }

  #settle() {
    if (this.#following) this.#log.scrollTop = this.#log.scrollHeight;
    this.#top = this.#log.scrollTop;
    this.#button.hidden = this.#following || this.#atEnd();
  }

  #atEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR;
  }
}
