// Requests as dots: those that wait stand before the arch, those that run are inside.
import { el } from "./dom.js";

const MOST = 48;

export class Queue {
  #waiting = el("div", { class: "dots waiting" });
  #running = el("div", { class: "dots running" });

  constructor(place) {
    place.append(this.#waiting, this.#running);
  }

  draw(running, waiting) {
    fill(this.#running, running);
    fill(this.#waiting, waiting);
  }
}

function fill(place, number) {
  const shown = Math.min(number, MOST);
  while (place.childElementCount > shown) place.lastChild.remove();
  while (place.childElementCount < shown) place.append(el("i"));
  place.dataset.more = number > MOST ? `+${number - MOST}` : "";
}
