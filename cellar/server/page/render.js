// A growing markdown text as elements. What was finished stays as it is; of the rest only what changed is made anew,
// so a long answer costs no more per word than a short one, and a selection in it survives.
import { colour, colourSoon } from "./colours.js";
import { copyButton, el } from "./dom.js";
import { formula } from "./formulas.js";
import { blocks, inline } from "./markdown.js";

const UNSETTLED = 2; // the next letter can still change the last block, and whether the one before it ends here

export class MarkdownView {
  #place;
  #settled = 0; // characters of the text whose blocks are final
  #open = []; // the blocks after them

  constructor(place) {
    this.#place = place;
  }

  /** Show `text`, which goes on from what was shown before. `open`: it will go on. */
  update(text, open) {
    const rest = text.slice(this.#settled);
    const fresh = blocks(rest, open);
    fresh.forEach((block, k) => (block.open = open && k === fresh.length - 1));
    reconcile(this.#place, this.#open, fresh);
    const done = open ? fresh.slice(0, -UNSETTLED) : [];
    if (done.length) this.#settled += offsetOfLine(rest, done.at(-1).end);
    this.#open = fresh.slice(done.length);
  }
}

function offsetOfLine(text, line) {
  let at = 0;
  for (let k = 0; k < line; k++) at = text.indexOf("\n", at) + 1;
  return at;
}

/** Turn the elements of `old` into those of `fresh`; both are lists of parsed objects, whose element is `dom`. */
function reconcile(place, old, fresh) {
  let same = 0;
  while (same < old.length && same < fresh.length && equal(old[same], fresh[same])) {
    fresh[same] = Object.assign(old[same], { end: fresh[same].end });
    same += 1;
  }
  if (same < old.length && same < fresh.length && updated(old[same], fresh[same])) same += 1;
  for (const gone of old.slice(same)) gone.dom.remove();
  for (const node of fresh.slice(same)) {
    node.dom = made(node);
    place.append(node.dom);
  }
}

function equal(a, b) {
  if (a.kind !== b.kind || Boolean(a.open) !== Boolean(b.open)) return false;
  if (a.raw !== undefined) return a.raw === b.raw && a.tight === b.tight;
  if (a.text !== b.text || a.href !== b.href || a.display !== b.display || a.children?.length !== b.children?.length) return false;
  return !a.children || a.children.every((child, k) => equal(child, b.children[k]));
}

/** Change the element of `old` to show `fresh`, if that is less work than making it anew. */
function updated(old, fresh) {
  if (old.kind !== fresh.kind) return false;
  const dom = old.dom;
  switch (fresh.kind) {
    case "text":
      if (!fresh.text.startsWith(old.text)) return false;
      dom.appendData(fresh.text.slice(old.text.length));
      break;
    case "code":
      if (old.raw === undefined || old.language !== fresh.language || !fresh.text.startsWith(old.text)) return false;
      writeOn(dom.querySelector("code"), fresh, fresh.text.slice(old.text.length));
      break;
    case "paragraph":
    case "heading":
      if (old.level !== fresh.level) return false;
      fresh.spans = inline(fresh.text, fresh.open);
      reconcile(dom, old.spans, fresh.spans);
      break;
    case "list":
      if (old.ordered !== fresh.ordered || old.start !== fresh.start) return false;
      dom.className = spacing(fresh);
      passOpen(fresh);
      reconcile(dom, old.children, fresh.children);
      break;
    case "quote":
    case "item":
      passOpen(fresh);
      reconcile(dom, old.children, fresh.children);
      break;
    case "em":
    case "strong":
    case "del":
      reconcile(dom, old.children, fresh.children);
      break;
    default:
      return false;
  }
  fresh.dom = dom;
  return true;
}

function spacing(list) {
  return list.tight ? "tight" : "loose";
}

function passOpen(node) {
  const last = node.children.at(-1);
  if (last) last.open = node.open;
}

function made(node) {
  switch (node.kind) {
    case "text": return document.createTextNode(node.text);
    case "break": return el("br");
    case "rule": return el("hr");
    case "paragraph": return spans(el("p"), node);
    // The conversation's title is the h1; a model's headings stand below it.
    case "heading": return spans(el(`h${Math.min(node.level + 1, 6)}`, { class: `level-${node.level}` }), node);
    case "quote": return nested(el("blockquote"), node);
    case "item": return nested(el("li"), node);
    case "list": return nested(el(node.ordered ? "ol" : "ul", { class: spacing(node), start: node.start !== 1 && node.start }), node);
    case "code": return node.raw === undefined ? el("code", {}, node.text) : codeBlock(node);
    case "math": return formula(node);
    case "table": return table(node);
    case "link": return within(el("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }), node.children);
    default: return within(el(node.kind), node.children);
  }
}

function within(place, children) {
  reconcile(place, [], children);
  return place;
}

function nested(place, node) {
  passOpen(node);
  return within(place, node.children);
}

function spans(place, node) {
  node.spans = inline(node.text, node.open);
  return within(place, node.spans);
}

function codeBlock(node) {
  const { language, text } = node;
  const code = el("code", {}, document.createTextNode(text));
  const label = language ? `Code, ${language}` : "Code";
  writeOn(code, node, "");
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => code.textContent, { "aria-label": "Copy the code" })),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, code));
}

/** Code goes on; what was there keeps its colours. */
function writeOn(code, { language, open }, more) {
  if (more && code.lastChild instanceof Text) code.lastChild.appendData(more);
  else if (more) code.append(more);
  if (!language) return;
  if (open) colourSoon(code, language);
  else colour(code, language);
}

function table({ align, head, rows }) {
  const cell = (tag, text, column) => within(el(tag, { class: align[column] && `to-${align[column]}`, scope: tag === "th" && "col" }), inline(text));
  const row = (tag, cells) => el("tr", {}, ...cells.map((text, column) => cell(tag, text, column)));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((cells) => row("td", cells)))));
}
