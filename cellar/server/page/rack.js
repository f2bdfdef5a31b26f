// A tier of memory as a rack of bottles: in use where sequences run, kept where something waits for a later request.
// A bottle is one chunk, or two, or four, ...: as many as it takes for the rack not to be full before the memory is.
import { el, svg } from "./dom.js";
import { bytes, percent } from "./format.js";

const COLUMNS = 24;
const ROWS = 8;
const CELLS = COLUMNS * ROWS;
const STEP = 10;
const RADIUS = 3.6;
const NAMES = { device: "Memory of the GPU", host: "Memory", offload: "Memory, second tier", disk: "Disk", remote: "Redis" };

export class Rack {
  #cells = [];
  #kinds = [];
  #figure = el("span", { class: "figure" });
  #legend = el("p", { class: "legend" });
  place;

  constructor(tier) {
    const sheet = svg("svg", { class: "rack", viewBox: `0 0 ${COLUMNS * STEP} ${ROWS * STEP}`, "aria-hidden": "true" });
    for (let k = 0; k < CELLS; k++) {
      const column = Math.floor(k / ROWS);
      const row = ROWS - 1 - (k % ROWS);
      const cell = svg("circle", { cx: column * STEP + STEP / 2, cy: row * STEP + STEP / 2, r: RADIUS });
      this.#cells.push(cell);
      sheet.append(cell);
    }
    this.place = el("figure", { class: "gauge" },
      el("figcaption", {}, el("span", { class: "gauge-name" }, NAMES[tier] ?? tier), this.#figure), sheet, this.#legend);
  }

  draw({ chunks, used_chunks: used, cached_chunks: cached, chunk_bytes: size }) {
    const bottle = bottleSize(used + cached, chunks);
    const full = Math.min(Math.ceil(used / bottle), CELLS);
    const laid = Math.min(Math.ceil((used + cached) / bottle), CELLS);
    this.#cells.forEach((cell, k) => {
      const kind = k < full ? "used" : k < laid ? "kept" : "";
      if (this.#kinds[k] === kind) return;
      this.#kinds[k] = kind;
      cell.setAttribute("class", kind);
    });
    this.#figure.replaceChildren(el("b", {}, percent((used + cached) / Math.max(chunks, 1))), ` of ${bytes(chunks * size)}`);
    this.#legend.replaceChildren(
      el("span", { class: "key used" }, `${bytes(used * size)} in use`),
      el("span", { class: "key kept" }, `${bytes(cached * size)} kept`),
      el("span", { class: "key" }, `a bottle: ${bytes(bottle * size)}`));
  }
}

/** Chunks per bottle. */
function bottleSize(filled, chunks) {
  let size = 1;
  while (filled > 0.9 * CELLS * size && CELLS * size < chunks) size *= 2;
  return Math.min(size, Math.max(chunks / CELLS, 1));
}
