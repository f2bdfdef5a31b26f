// Reads a growing answer to a screen reader: whole sentences, a few at a time, never letters as they come.
import { byId, el, say } from "./dom.js";

const PAUSE = 1500; // ms between additions
const KEPT_FOR = 10_000; // ms after the end
const KEPT = 12; // lines that stay in the region

export class AnswerReader {
  #place = byId("spoken");
  #read = 0;
  #last = 0;
  #cleared = 0;

  /** A new answer begins at character `from` of its text. */
  began(from = 0) {
    this.#read = from;
    this.#last = performance.now();
    clearTimeout(this.#cleared);
    this.#place.replaceChildren();
    say("Answering");
  }

  /** The text so far. */
  grew(text) {
    if (performance.now() - this.#last < PAUSE) return;
    const fresh = text.slice(this.#read);
    const end = Math.max(...[...fresh.matchAll(/[.!?:]["')\]]*\s|\n/g)].map((found) => found.index + found[0].length), 0);
    if (end) this.#add(fresh.slice(0, end));
  }

  ended(text, how) {
    this.#add(text.slice(this.#read));
    say(how);
    // Spoken by now or queued: whoever walks through the page should not meet the answer twice.
    this.#cleared = setTimeout(() => this.#place.replaceChildren(), KEPT_FOR);
  }

  #add(text) {
    this.#read += text.length;
    this.#last = performance.now();
    const plain = text.replace(/[*_`#>|]+/g, " ").trim();
    if (!plain) return;
    this.#place.append(el("p", {}, plain));
    while (this.#place.childElementCount > KEPT) this.#place.firstChild.remove();
  }
}
