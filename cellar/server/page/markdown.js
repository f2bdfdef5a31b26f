// Markdown as blocks and, within them, inline marks: markdown-it's tokens as trees of plain objects.
//   { kind: "paragraph", text } | { kind: "heading", level, text } | { kind: "rule" } | { kind: "math", display, text }
//   { kind: "code", language, text } | { kind: "quote", children } | { kind: "table", align, head, rows }
//   { kind: "list", ordered, start, tight, children: [{ kind: "item", children }] }
// and of each: raw (its lines), end (the line after it, counted in what was parsed)
import MarkdownIt from "./libraries/markdown-it.js";
import { mathematics } from "./formulas.js";
import { unfinished } from "./unfinished.js";

const reader = new MarkdownIt({ breaks: true, linkify: true }).use(mathematics).use(unfinished);
// What a model writes with an indent is seldom code, its "---" is a rule, and a definition that may still come cannot
// change what is there already. HTML is text.
reader.disable(["code", "lheading", "reference", "html_block", "html_inline"]);
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
reader.validateLink = () => true; // see `safe`
reader.inline.ruler.before("autolink", "line_break", (state, silent) => {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 16));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});

/** The blocks of a text. `open`: more is to come, so what is not closed yet is taken as if it were. */
export function blocks(text, open = false) {
  const source = text.replaceAll("\r", "").replaceAll("\0", "\ufffd");
  const tokens = [];
  reader.block.parse(source, reader, { open }, tokens);
  return nested(tokens, source.split("\n"));
}

/** The marks within a block's text:
      { kind: "text" | "code", text } | { kind: "break" } | { kind: "math", display, text }
      { kind: "em" | "strong" | "del", children } | { kind: "link", href, children } */
export function inline(text, open = false) {
  const [{ children }] = reader.parseInline(text, { open });
  return marks(children);
}

/** A text's beginning without its marks. */
export function plain(text) {
  const said = (nodes) => nodes.map((node) => node.text ?? (node.children ? said(node.children) : " ")).join("");
  const words = (found) => found.map((one) => (one.children ? words(one.children) : one.kind === "table" ? one.head.join(" ") : one.kind === "paragraph" || one.kind === "heading" ? said(inline(one.text)) : (one.text ?? ""))).join(" ");
  return words(blocks(text.slice(0, 2000))).replace(/\s+/g, " ").trim();
}

function nested(tokens, lines) {
  const root = { children: [] };
  const path = [root];
  let table = null;
  for (const token of tokens) {
    const top = path.at(-1);
    if (token.nesting < 0) {
      if (/^(paragraph|heading|blockquote|(bullet|ordered)_list|list_item|table)_close$/.test(token.type)) path.pop();
      continue;
    }
    const add = (kind, more = {}) => {
      const raw = token.map && lines.slice(...token.map).join("\n");
      const node = { kind, ...more, raw: raw ?? "", end: token.map?.[1] };
      top.children.push(node);
      if (token.nesting > 0) path.push(node);
      return node;
    };
    switch (token.type) {
      case "paragraph_open":
        add("paragraph", { text: "" });
        // markdown-it hides the paragraphs of a tight list
        if (token.hidden) path.at(-3).tight = true;
        break;
      case "heading_open": add("heading", { level: Number(token.tag[1]), text: "" }); break;
      case "blockquote_open": add("quote", { children: [] }); break;
      case "bullet_list_open": add("list", { ordered: false, start: 1, tight: false, children: [] }); break;
      case "ordered_list_open": add("list", { ordered: true, start: Number(token.attrGet("start") ?? 1), tight: false, children: [] }); break;
      case "list_item_open": add("item", { children: [] }); break;
      case "table_open": table = add("table", { align: [], head: [], rows: [] }); break;
      case "tr_open": table.rows.push([]); break;
      case "th_open": table.align.push(/\w+$/.exec(token.attrGet("style") ?? "")?.[0] ?? null); break;
      case "fence": add("code", { language: token.info.trim().split(/\s+/)[0], text: token.content.replace(/\n$/, "") }); break;
      case "hr": add("rule"); break;
      case "math_block": add("math", { display: true, text: token.content }); break;
      case "inline":
        if (top.kind === "table") table.rows.at(-1).push(token.content);
        else top.text = token.content;
    }
  }
  return root.children.map(headed);
}

/** A table's first row is its head. */
function headed(node) {
  node.children?.forEach(headed);
  if (node.kind === "table") [node.head] = node.rows.splice(0, 1);
  return node;
}

const SPANS = { em_open: "em", strong_open: "strong", s_open: "del", link_open: "link" };

function marks(tokens) {
  const root = { children: [] };
  const path = [root];
  for (const token of tokens) {
    const { children } = path.at(-1);
    if (token.nesting < 0) path.pop();
    else if (token.nesting > 0) {
      const node = { kind: SPANS[token.type], children: [] };
      if (node.kind === "link") node.href = safe(token.attrGet("href"));
      children.push(node);
      path.push(node);
    } else if (token.type === "softbreak" || token.type === "hardbreak") children.push({ kind: "break" });
    else if (token.type === "code_inline") children.push({ kind: "code", text: token.content });
    else if (token.type === "math_inline") children.push({ kind: "math", display: token.meta.display, text: token.content });
    else if (token.type === "image") children.push({ kind: "link", href: safe(token.attrGet("src")), children: marks(token.children) });
    else if (token.content) children.push({ kind: "text", text: token.content });
  }
  return tidy(root.children);
}

/** Neighbouring texts as one, and links that lead nowhere as their text. */
function tidy(nodes) {
  const kept = [];
  for (const node of nodes.flatMap((one) => (one.kind === "link" && !one.href ? one.children : [one]))) {
    if (node.children) node.children = tidy(node.children);
    if (node.kind === "text" && kept.at(-1)?.kind === "text") kept.at(-1).text += node.text;
    else kept.push(node);
  }
  return kept;
}

/** An address that may be followed, or null. */
function safe(href) {
  try {
    const { protocol } = new URL(href);
    return protocol === "https:" || protocol === "http:" || protocol === "mailto:" ? href : null;
  } catch {
    return null;
  }
}
