// A side of the page. Where there is room it stands beside the conversation; else it lies over it, and holds the focus.
import { byId } from "./dom.js";

export class Drawer {
  static #all = [];
  #side;
  #opener;
  #wide;
  #veil = byId("veil");
  #closed; // called when a wide one is put away or brought back

  /** `wide` is the media query from which on there is room; `shown` says whether it stands there at first. */
  constructor(side, opener, closer, wide, shown = true, closed = () => {}) {
    this.#side = side;
    this.#opener = opener;
    this.#wide = matchMedia(wide);
    this.#closed = closed;
    side.classList.toggle("away", !shown);
    opener.addEventListener("click", () => this.toggle());
    closer.addEventListener("click", () => this.close());
    this.#veil.addEventListener("click", () => this.close());
    this.#wide.addEventListener("change", () => this.#settle());
    side.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.over) {
        event.stopPropagation();
        this.close();
      }
    });
    Drawer.#all.push(this);
    this.#settle();
  }

  /** True while it lies over the conversation. */
  get over() {
    return this.#side.classList.contains("over");
  }

  get open() {
    return this.over || (this.#wide.matches && !this.#side.classList.contains("away"));
  }

  toggle() {
    if (this.open) this.close();
    else if (this.#wide.matches) this.#away(false);
    else {
      this.#side.classList.add("over");
      this.#settle();
      this.#side.querySelector("button, [tabindex]").focus();
    }
  }

  close() {
    if (this.over) {
      this.#side.classList.remove("over");
      this.#settle();
      this.#opener.focus();
    } else if (this.#wide.matches && this.open) {
      const held = this.#side.contains(document.activeElement);
      this.#away(true);
      if (held) this.#opener.focus();
    }
  }

  #away(away) {
    this.#side.classList.toggle("away", away);
    this.#closed(away);
    this.#settle();
  }

  #settle() {
    if (this.#wide.matches) this.#side.classList.remove("over");
    this.#opener.setAttribute("aria-expanded", String(this.open));
    const covered = Drawer.#all.some((drawer) => drawer.over);
    for (const drawer of Drawer.#all) drawer.#side.inert = covered ? !drawer.over : !drawer.open;
    byId("main").inert = covered;
    this.#veil.hidden = !covered;
  }
}
