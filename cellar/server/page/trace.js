// Tokens per second over the last minute, gliding to the left.
import { svg } from "./dom.js";

const LENGTH = 60; // samples
const HEIGHT = 64;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class Trace {
  #values = new Array(LENGTH + 1).fill(0);
  #area = svg("path", { class: "trace-area" });
  #line = svg("path", { class: "trace-line", "vector-effect": "non-scaling-stroke" });
  #sheet = svg("svg", { viewBox: `0 0 ${LENGTH} ${HEIGHT}`, preserveAspectRatio: "none" }, this.#area, this.#line);
  #scale = 1;

  constructor(place) {
    place.append(this.#sheet);
  }

  /** One more second; gives the highest value that is seen. */
  push(value) {
    this.#values.push(value);
    this.#values.shift();
    const highest = Math.max(...this.#values);
    // The scale follows at once upwards, and slowly downwards, so that the curve does not jump.
    this.#scale = Math.max(highest, 0.9 * this.#scale, 1);
    const points = this.#values.map((v, k) => [k, HEIGHT - 1 - (v / this.#scale) * (HEIGHT - 8)]);
    const line = smooth(points);
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", `${line}L${LENGTH} ${HEIGHT}L0 ${HEIGHT}Z`);
    if (highest > 0 && !STILL.matches) {
      const step = 100 / LENGTH;
      this.#sheet.animate([{ transform: `translateX(${step}%)` }, { transform: "none" }], { duration: 1000 });
    }
    return highest;
  }
}

/** A curve through points that never overshoots them: its tangents are level. */
export function smooth(points) {
  let path = `M${points[0][0]} ${points[0][1].toFixed(1)}`;
  for (let k = 1; k < points.length; k++) {
    const [x0, y0] = points[k - 1];
    const [x1, y1] = points[k];
    const middle = (x0 + x1) / 2;
    path += y0 === y1 ? `L${x1} ${y1.toFixed(1)}` : `C${middle} ${y0.toFixed(1)} ${middle} ${y1.toFixed(1)} ${x1} ${y1.toFixed(1)}`;
  }
  return path;
}

/** The small one in the bar: the last minute. */
export class Spark {
  #values = new Array(31).fill(0);
  #path;

  constructor(sheet) {
    this.#path = sheet.querySelector("path");
  }

  push(value) {
    this.#values.push(value);
    this.#values.shift();
    const highest = Math.max(...this.#values, 1);
    this.#path.setAttribute("d", smooth(this.#values.map((v, k) => [2 * k, 16.5 - (v / highest) * 14])));
  }
}
