// Inline markdown to a tree of plain objects, after CommonMark's delimiter rules.
//   { kind: "text", text } | { kind: "code", text } | { kind: "break" }
//   { kind: "em" | "strong" | "del", children } | { kind: "link", href, children }

const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PLAIN = /[^\\`*_~[\]!<&\n]+/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const ADDRESS = /\bhttps?:\/\/[^\s<>]+/g;
const MOST_MARKS = 4000; // beyond this a paragraph is noise, and emphasis in it is not worth its cost

/** The tree of a text. `open`: more is to come, so what is not closed yet is shown as if it were. */
export function inline(text, open = false) {
  const reader = new Reader(text, open);
  reader.read();
  return linked(merged(emphasised(reader.nodes, open)));
}

class Reader {
  nodes = [];
  #text;
  #open;
  #at = 0;
  #brackets = [];
  #ticks = null;

  constructor(text, open) {
    this.#text = text;
    this.#open = open;
  }

  read() {
    const text = this.#text;
    while (this.#at < text.length) {
      PLAIN.lastIndex = this.#at;
      const plain = PLAIN.exec(text);
      if (plain) {
        this.#say(plain[0]);
        this.#at += plain[0].length;
        continue;
      }
      switch (text[this.#at]) {
        case "\\": this.#escape(); break;
        case "`": this.#code(); break;
        case "*": case "_": case "~": this.#mark(); break;
        case "[": this.#bracket(1); break;
        case "!": text[this.#at + 1] === "[" ? this.#bracket(2) : this.#say(text[this.#at++]); break;
        case "]": this.#link(); break;
        case "<": this.#angle(); break;
        case "&": this.#entity(); break;
        case "\n": this.#line(); break;
        default: this.#say(text[this.#at++]);
      }
    }
  }

  #say(text) {
    this.nodes.push({ kind: "text", text });
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    if (next === "\n") this.#at += 1;
    else if (ESCAPABLE.test(next)) {
      this.#say(next);
      this.#at += 2;
    } else this.#say(this.#text[this.#at++]);
  }

  #line() {
    const last = this.nodes.at(-1);
    if (last?.kind === "text") last.text = last.text.trimEnd();
    this.nodes.push({ kind: "break" });
    this.#at += 1;
    while (this.#text[this.#at] === " ") this.#at += 1;
  }

  #code() {
    const start = this.#at;
    const size = run(this.#text, start, "`");
    const from = start + size;
    const end = this.#closingTicks(size, from);
    if (end < 0 && !(this.#open && size < 3 && from < this.#text.length)) {
      this.#say("`".repeat(size));
      this.#at = from;
      return;
    }
    let code = this.#text.slice(from, end < 0 ? undefined : end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
    this.nodes.push({ kind: "code", text: code });
    this.#at = end < 0 ? this.#text.length : end + size;
  }

  /** Where a run of just `size` ticks begins at or after `from`; runs are looked up, not searched for again. */
  #closingTicks(size, from) {
    if (!this.#ticks) {
      this.#ticks = new Map();
      for (const { 0: ticks, index } of this.#text.matchAll(/`+/g)) {
        if (!this.#ticks.has(ticks.length)) this.#ticks.set(ticks.length, []);
        this.#ticks.get(ticks.length).push(index);
      }
    }
    const places = this.#ticks.get(size) ?? [];
    while (places.length && places[0] < from) places.shift();
    return places[0] ?? -1;
  }

  #mark() {
    const sign = this.#text[this.#at];
    const size = run(this.#text, this.#at, sign);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + size] ?? " ";
    this.#at += size;
    const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const word = sign === "_";
    this.nodes.push({
      kind: "mark",
      sign,
      size,
      whole: size,
      opens: left && (!word || !right || PUNCTUATION.test(before)) && !(sign === "~" && size > 2),
      closes: right && (!word || !left || PUNCTUATION.test(after)) && !(sign === "~" && size > 2),
    });
  }

  #bracket(size) {
    this.#brackets.push(this.nodes.length);
    this.#say(this.#text.slice(this.#at, this.#at + size));
    this.#at += size;
  }

  #link() {
    const from = this.#brackets.pop();
    const target = from === undefined ? null : destination(this.#text, this.#at + 1, this.#open);
    if (!target) {
      this.#say("]");
      this.#at += 1;
      return;
    }
    const [, ...inside] = this.nodes.splice(from);
    const children = merged(emphasised(inside, false));
    const href = safe(target.href);
    if (href) {
      this.nodes.push({ kind: "link", href, children });
      this.#brackets = []; // no links in links
    } else this.nodes.push(...children);
    this.#at = target.end;
  }

  #angle() {
    const rest = this.#text.slice(this.#at, this.#at + 2048);
    const address = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i.exec(rest);
    const line = /^<br\s*\/?>/i.exec(rest);
    if (address && safe(address[1])) {
      const text = address[1].replace(/^mailto:/i, "");
      this.nodes.push({ kind: "link", href: safe(address[1]), children: [{ kind: "text", text }] });
    } else if (line) this.nodes.push({ kind: "break" });
    else this.#say("<");
    this.#at += (address ?? line ?? "<")[0].length;
  }

  #entity() {
    const found = /^&(#?\w{2,5});/.exec(this.#text.slice(this.#at, this.#at + 8));
    const text = found && ENTITIES[found[1]];
    this.#say(text ?? "&");
    this.#at += text ? found[0].length : 1;
  }
}

/** CommonMark's "process emphasis", over a list. */
function emphasised(nodes, open) {
  const marks = nodes.reduce((count, node) => count + (node.kind === "mark"), 0);
  if (marks && marks <= MOST_MARKS) {
    const bottoms = new Map();
    for (let k = 0; k < nodes.length; k++) {
      const closer = nodes[k];
      if (closer.kind !== "mark" || !closer.closes) continue;
      const type = `${closer.sign}${closer.opens}${closer.whole % 3}`;
      let j = k - 1;
      while (j >= (bottoms.get(type) ?? 0) && !matches(nodes[j], closer)) j--;
      if (j < (bottoms.get(type) ?? 0)) {
        bottoms.set(type, k);
        continue;
      }
      const opener = nodes[j];
      const size = closer.sign === "~" ? closer.size : Math.min(opener.size, closer.size, 2);
      const kind = closer.sign === "~" ? "del" : size === 2 ? "strong" : "em";
      nodes.splice(j + 1, k - j - 1, { kind, children: literal(nodes.slice(j + 1, k)) });
      opener.size -= size;
      closer.size -= size;
      k = j + 1; // the new node; the closer stands behind it
      if (!opener.size) nodes.splice(j, 1), (k -= 1);
      if (!closer.size) nodes.splice(k + 1, 1);
      for (const [key, bottom] of bottoms) if (bottom > j) bottoms.set(key, j);
    }
    if (open) closeLast(nodes);
  }
  return literal(nodes);
}

function matches(node, closer) {
  if (node.kind !== "mark" || node.sign !== closer.sign || !node.opens) return false;
  if (closer.sign === "~") return node.size === closer.size;
  const either = node.closes || closer.opens;
  return !(either && (node.whole + closer.whole) % 3 === 0 && (node.whole % 3 || closer.whole % 3));
}

/** Strong text that is still being written is shown strong at once, not first with its stars. */
function closeLast(nodes) {
  const from = nodes.findIndex((node) => node.kind === "mark" && node.opens && node.sign === "*" && node.size === 2);
  if (from < 0) return;
  const children = literal(nodes.splice(from).slice(1));
  nodes.push({ kind: "strong", children });
}

function literal(nodes) {
  return nodes.map((node) => (node.kind === "mark" ? { kind: "text", text: node.sign.repeat(node.size) } : node));
}

function merged(nodes) {
  const kept = [];
  for (const node of nodes) {
    const last = kept.at(-1);
    if (node.children) node.children = merged(node.children);
    if (node.kind === "text" && last?.kind === "text") last.text += node.text;
    else kept.push(node.kind === "text" ? { ...node } : node);
  }
  return kept;
}

/** Bare addresses become links. */
function linked(nodes) {
  return nodes.flatMap((node) => {
    if (node.kind === "link" || node.kind === "code") return [node];
    if (node.children) return [{ ...node, children: linked(node.children) }];
    if (node.kind !== "text" || !node.text.includes("://")) return [node];
    const parts = [];
    let from = 0;
    for (const { 0: found, index } of node.text.matchAll(ADDRESS)) {
      const address = trimmed(found);
      if (!safe(address)) continue;
      if (index > from) parts.push({ kind: "text", text: node.text.slice(from, index) });
      parts.push({ kind: "link", href: safe(address), children: [{ kind: "text", text: address }] });
      from = index + address.length;
    }
    if (from < node.text.length) parts.push({ kind: "text", text: node.text.slice(from) });
    return parts;
  });
}

/** Punctuation at the end belongs to the sentence, and so does a bracket that the address did not open. */
function trimmed(address) {
  let text = address.replace(/[?!.,:;*_~'"]+$/, "");
  while (text.endsWith(")") && text.split(")").length > text.split("(").length) text = text.slice(0, -1);
  return text;
}

/** `(target "title")` after a link's text. Half a target at the end of an open text is taken as one without address. */
function destination(text, at, open) {
  if (text[at] !== "(") return null;
  const found = /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
    text.slice(at, at + 4096),
  );
  if (found) return { href: (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"), end: at + found[0].length };
  if (open && text.length - at < 4096 && !text.slice(at).includes(")")) return { href: "", end: text.length };
  return null;
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

function run(text, from, sign) {
  let end = from;
  while (text[end] === sign) end += 1;
  return end - from;
}
