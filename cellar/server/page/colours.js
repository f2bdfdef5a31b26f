// Colours of code. The library comes with the first block whose language it knows; until then, and while a long block is
// written, code is plain.
import { el } from "./dom.js";

const LONGEST = 100_000; // characters; more is shown plain
const AGAIN = 300; // ms between two colourings of a block that grows

let library = null;

/** Colour the text of a <code> element. */
export async function colour(place, language) {
  const { default: hljs } = await (library ??= load());
  const text = place.textContent;
  if (!hljs?.getLanguage(language) || text.length > LONGEST) return;
  const { _emitter: made } = hljs.highlight(text, { language, ignoreIllegals: true });
  // What came meanwhile is not coloured yet.
  if (place.textContent === text) place.replaceChildren(made.root);
}

/** Colour a block that grows, now and then; the time of a colouring is bounded by the block's length. */
export function colourSoon(place, language) {
  if (!language || place.waiting || place.textContent.length > LONGEST / 5) return;
  place.waiting = setTimeout(() => {
    place.waiting = 0;
    if (place.isConnected) colour(place, language);
  }, AGAIN);
}

async function load() {
  try {
    const found = await import("./libraries/highlight.js");
    found.default.configure({ __emitter: Elements });
    return found;
  } catch {
    return {};
  }
}

/** What highlight.js finds, as elements instead of HTML. */
class Elements {
  root = document.createDocumentFragment();
  #path = [this.root];

  addText(text) {
    this.#path[0].append(text);
  }

  startScope(name) {
    const made = el("span", { class: `c-${name.split(".")[0]}` });
    this.#path[0].append(made);
    this.#path.unshift(made);
  }

  endScope() {
    this.#path.shift();
  }

  openNode(name) {
    this.startScope(name);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(other) {
    this.#path[0].append(other.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}
