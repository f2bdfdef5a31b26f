// Where the user writes. Enter sends, except on a touch keyboard, whose Enter is for lines.
import { byId } from "./dom.js";

const touch = matchMedia("(hover: none) and (pointer: coarse)");

/** True if a key sends what is written. Enter that ends the composition of a character (Japanese, say) does not. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches;

export class Composer {
  #field = byId("ask");
  #send = byId("send");
  #stop = byId("stop");
  #running = false;

  /** `send(text)` and `stop()` are called. */
  constructor(send, stop) {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.#field.value.trim();
      if (!text || this.#running) return;
      this.text = "";
      send(text);
    });
    this.#field.addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    this.#field.addEventListener("input", () => this.#fit());
    this.#stop.addEventListener("click", stop);
  }

  get text() {
    return this.#field.value;
  }

  set text(text) {
    this.#field.value = text;
    this.#fit();
  }

  set placeholder(text) {
    this.#field.placeholder = text;
  }

  /** While an answer runs there is a stop button instead of the one to send. */
  set running(running) {
    const held = document.activeElement === this.#send || document.activeElement === this.#stop;
    this.#running = running;
    this.#send.hidden = running;
    this.#stop.hidden = !running;
    this.#fit();
    if (held) (running ? this.#stop : this.#field).focus();
  }

  focus() {
    this.#field.focus();
  }

  #fit() {
    this.#send.disabled = !this.#field.value.trim();
    if (CSS.supports("field-sizing", "content")) return;
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`;
  }
}
