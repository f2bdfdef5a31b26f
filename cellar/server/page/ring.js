// A share of a whole, as a ring.
import { svg } from "./dom.js";

const RADIUS = 20;
const ROUND = 2 * Math.PI * RADIUS;

export class Ring {
  #arc = svg("circle", { class: "ring-arc", cx: 24, cy: 24, r: RADIUS, "stroke-dasharray": `0 ${ROUND}` });

  constructor(place) {
    const track = svg("circle", { class: "ring-track", cx: 24, cy: 24, r: RADIUS });
    place.append(svg("svg", { viewBox: "0 0 48 48" }, track, this.#arc));
  }

  draw(share) {
    this.#arc.style.strokeDasharray = `${share * ROUND} ${ROUND}`;
  }
}
