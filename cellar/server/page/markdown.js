// Blocks of markdown: CommonMark as models write it, with GitHub's tables. Each block knows the lines it came from.
//   { kind: "paragraph", text } | { kind: "heading", level, text } | { kind: "rule" }
//   { kind: "code", language, text } | { kind: "quote", children } | { kind: "table", align, head, rows }
//   { kind: "list", ordered, start, tight, children: [{ kind: "item", children }] }
// and of each: raw (its lines), end (the line after it, counted in what was parsed)

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(?:( +)(.*)|)$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEEPEST = 12; // a thousand ">" in a row are no quotation

/** The blocks of a text. */
export function blocks(text) {
  return parse(text.split("\n").map(expanded), 0);
}

function parse(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = deepEnough(lines, at, depth) ?? paragraph(lines, at);
    found.push({ ...block, raw: lines.slice(at, end).join("\n"), end });
    at = end;
  }
  return found;
}

function deepEnough(lines, at, depth) {
  const simple = code(lines, at) ?? rule(lines, at) ?? heading(lines, at) ?? table(lines, at);
  return simple ?? (depth < DEEPEST ? (quote(lines, at, depth) ?? list(lines, at, depth)) : null);
}

/** True if a line begins something that may interrupt a paragraph. */
function interrupts(line) {
  const item = ITEM.exec(line);
  return (
    FENCE.test(line) || RULE.test(line) || HEADING.test(line) || QUOTE.test(line) ||
    Boolean(item && item[5] && (item[3] === undefined || item[3] === "1"))
  );
}

function paragraph(lines, from) {
  let end = from + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  return [{ kind: "paragraph", text: lines.slice(from, end).map((line) => line.trimStart()).join("\n").trimEnd() }, end];
}

function code(lines, from) {
  const fence = FENCE.exec(lines[from]);
  if (!fence) return null;
  const [, indent, marks, info] = fence;
  const closing = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}[ \\t]*$`);
  let end = from + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(from + 1, end).map((line) => line.replace(strip, "")).join("\n");
  return [{ kind: "code", language: info.trim().split(/\s+/)[0], text }, Math.min(end + 1, lines.length)];
}

function rule(lines, from) {
  return RULE.test(lines[from]) ? [{ kind: "rule" }, from + 1] : null;
}

function heading(lines, from) {
  const found = HEADING.exec(lines[from]);
  return found && [{ kind: "heading", level: found[1].length, text: (found[2] ?? "").trim() }, from + 1];
}

function table(lines, from) {
  const next = lines[from + 1];
  if (!lines[from].includes("|") || next === undefined || !next.includes("-") || !DELIMITERS.test(next)) return null;
  const head = cells(lines[from]);
  const align = cells(next).map((cell) => ({ "::": "center", ":": "left", "-:": "right" })[edges(cell)] ?? null);
  if (align.length !== head.length) return null;
  let end = from + 2;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  const rows = lines.slice(from + 2, end).map((line) => head.map((_, column) => cells(line)[column] ?? ""));
  return [{ kind: "table", align, head, rows }, end];
}

function edges(cell) {
  return cell.length > 1 && cell.endsWith(":") ? (cell.startsWith(":") ? "::" : "-:") : cell.startsWith(":") ? ":" : "";
}

/** Cells of a row; a pipe with a backslash, or in code, is text. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  const parts = inner.match(/(?:\\.|`[^`]*`|[^|\\`]|[\\`])+|(?<=\||^)(?=\||$)/g) ?? [""];
  return parts.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function quote(lines, from, depth) {
  if (!QUOTE.test(lines[from])) return null;
  const inside = [];
  let end = from;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (QUOTE.test(line)) inside.push(line.replace(QUOTE, ""));
    else if (line.trim() && !interrupts(line) && inside.at(-1).trim()) inside.push(line);
    else break;
  }
  return [{ kind: "quote", children: parse(inside, depth + 1) }, end];
}

function list(lines, from, depth) {
  const first = ITEM.exec(lines[from]);
  if (!first) return null;
  const children = [];
  let at = from;
  let loose = false;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || RULE.test(lines[at]) || sign(item) !== sign(first)) break;
    const [inside, end] = itemLines(lines, at, item);
    const blocks = parse(inside, depth + 1);
    loose ||= inside.some((line, k) => !line.trim() && k < inside.length - 1) && blocks.length > 1 && spaced(blocks, inside);
    children.push({ kind: "item", children: blocks, raw: inside.join("\n") });
    at = end;
    let next = at;
    while (next < lines.length && !lines[next].trim()) next += 1;
    const after = next < lines.length ? ITEM.exec(lines[next]) : null;
    if (!after || sign(after) !== sign(first) || RULE.test(lines[next])) break;
    loose ||= next > at;
    at = next;
  }
  const ordered = first[3] !== undefined;
  return [{ kind: "list", ordered, start: Number(first[3] ?? 1), tight: !loose, children }, at];
}

function sign(item) {
  return item[2].at(-1);
}

/** The lines of an item without its indent, and where they end. Two columns of indent are enough, as models write. */
function itemLines(lines, from, item) {
  const marker = item[1].length + item[2].length;
  const gap = item[4] === undefined || item[4].length > 4 ? 1 : item[4].length;
  const width = marker + gap;
  const least = Math.min(width, item[1].length + 2);
  const inside = [item[5] === undefined ? "" : lines[from].slice(width)];
  let end = from + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const indent = line.length - line.trimStart().length;
    if (!line.trim()) inside.push("");
    else if (indent >= least) inside.push(line.slice(Math.min(indent, width)));
    else if (inside.at(-1) && !interrupts(line) && !ITEM.test(line) && !inside.at(-1).startsWith("```")) inside.push(line);
    else break;
  }
  while (inside.length > 1 && !inside.at(-1)) {
    inside.pop();
    end -= 1;
  }
  return [inside, end];
}

/** True if a blank line stands between two of the blocks. */
function spaced(blocks, lines) {
  return blocks.slice(0, -1).some((block) => block.end < lines.length && !lines[block.end].trim());
}

function expanded(line) {
  return line.replace(/\r$/, "").replace(/^[ \t]+/, (blank) => blank.replaceAll("\t", "    "));
}
