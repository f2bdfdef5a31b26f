// Where the user writes. Enter sends, except on a touch keyboard, whose Enter is for lines.
import { button, byId, el, say } from "./dom.js";
import { onFiles, readText } from "./files.js";

const touch = matchMedia("(hover: none) and (pointer: coarse)");

/** True if a key sends what is written. Enter that ends the composition of a character (Japanese, say) does not. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches;

export class Composer {
  #field = byId("ask");
  #send = byId("send");
  #stop = byId("stop");
  #running = false;
  #files = [];

  /** `send(text, files)` and `stop()` are called. */
  constructor(send, stop) {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.#field.value.trim();
      if ((!text && !this.#files.length) || this.#running) return;
      const files = this.#files;
      this.#files = [];
      this.#list();
      this.text = "";
      send(text, files);
    });
    this.#field.addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    this.#field.addEventListener("input", () => this.#fit());
    this.#stop.addEventListener("click", stop);
    const chosen = byId("attach-field");
    byId("attach").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", async () => {
      await this.#add([...chosen.files]);
      chosen.value = "";
    });
    onFiles((files) => this.#add(files));
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

  async #add(files) {
    byId("files-wrong").textContent = "";
    for (const file of files) {
      try {
        this.#files.push(await readText(file));
      } catch (error) {
        byId("files-wrong").textContent = error.message;
      }
    }
    this.#list();
    this.focus();
  }

  #list() {
    const entry = (file) => el("li", {}, el("span", {}, file.name), button(`Leave out ${file.name}`, "close", () => {
      this.#files = this.#files.filter((other) => other !== file);
      this.#list();
      this.focus();
      say(`${file.name} is left out`);
    }, { bare: true }));
    byId("files").replaceChildren(...this.#files.map(entry));
    byId("files").hidden = !this.#files.length;
    this.#fit();
  }

  #fit() {
    this.#send.disabled = !this.#field.value.trim() && !this.#files.length;
    if (CSS.supports("field-sizing", "content")) return;
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`;
  }
}
