// Mathematics: where it stands in a text, and how it is shown. $a$ and \(a\) are within a line; $$a$$ and \[a\] are by themselves.
import { el } from "./dom.js";

const OPENS = { "$$": "$$", "\\[": "\\]" };
// A dollar before a blank, or after one, is money, and so is one before a digit (as in pandoc).
const WITHIN = /^(?:\$\$([^\n]+?)\$\$|\$(?![\s$])((?:[^$\\\n]|\\[^\n])*?)(?<!\s)\$(?!\d)|\\\(([^\n]+?)\\\)|\\\[([^\n]+?)\\\])/;
const MONEY = /^\d[\d.,]*\s+[a-z]{2,}/i; // "$10, or 3$"
const LONGEST = 2000; // characters of a formula within a line
const LIMITS = { throwOnError: true, strict: "ignore", trust: false, maxExpand: 500, maxSize: 20 };

let library = null;

/** The rules as an extension of markdown-it. */
export function mathematics(reader) {
  reader.block.ruler.before("fence", "math_block", block, { alt: ["paragraph", "blockquote", "list"] });
  reader.inline.ruler.before("escape", "math_inline", within);
}

function block(state, from, to, silent) {
  if (state.sCount[from] - state.blkIndent >= 4) return false;
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]).trimEnd();
  const opener = line(from).slice(0, 2);
  const closer = OPENS[opener];
  if (!closer) return false;
  const found = [];
  let ended = false;
  let next = from;
  for (; next < to && !ended; next++) {
    const text = next === from ? line(next).slice(2) : line(next);
    if (!text && next > from) break; // a blank line ends a paragraph, and what looked like a formula
    if (next > from && state.sCount[next] < state.blkIndent) break;
    const at = text.indexOf(closer);
    if (at >= 0 && at + 2 < text.length) return false; // words stand behind it: it is within a line
    ended = at >= 0;
    found.push(ended ? text.slice(0, at) : text);
  }
  if (!ended && !(state.env.open && next >= to)) return false;
  const content = found.join("\n").trim();
  if (!content) return false;
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  Object.assign(token, { block: true, content, map: [from, next] });
  state.line = next;
  return true;
}

function within(state, silent) {
  const sign = state.src[state.pos];
  if (sign !== "$" && sign !== "\\") return false;
  const found = WITHIN.exec(state.src.slice(state.pos, Math.min(state.pos + LONGEST, state.posMax)));
  if (!found) return false;
  const [whole, display, dollars, round, square] = found;
  const content = display ?? dollars ?? round ?? square;
  if (!content.trim() || (dollars && MONEY.test(dollars))) return false;
  if (!silent) {
    const token = state.push("math_inline", "", 0);
    Object.assign(token, { content, meta: { display: (display ?? square) !== undefined } });
  }
  state.pos += whole.length;
  return true;
}

/** An element that shows a formula: its source at first, and for good if it is none. `open`: it is still being written. */
export function formula({ text, display, open }) {
  const attributes = display ? { class: "math display", tabindex: "0", role: "group", "aria-label": "Formula" } : { class: "math" };
  const place = el("span", attributes, text);
  if (!open) typeset(place, text, display);
  return place;
}

async function typeset(place, text, display) {
  const katex = await (library ??= load());
  const fresh = document.createDocumentFragment();
  try {
    katex?.render(text, fresh, { ...LIMITS, displayMode: display });
  } catch {
    place.classList.add("source");
    return;
  }
  if (katex) place.replaceChildren(fresh);
}

/** The library, once a formula is there; null if it does not come. */
async function load() {
  const style = el("link", { rel: "stylesheet", href: "page/libraries/katex.css" });
  document.head.append(style);
  await import("./libraries/katex.js").catch(() => {});
  return globalThis.katex ?? null;
}
