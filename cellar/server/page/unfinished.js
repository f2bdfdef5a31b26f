// What is still being written looks as it will: marks that have begun are taken as if they were closed. Only for texts
// that are parsed with { open: true }.

/** The rules as an extension of markdown-it. */
export function unfinished(reader) {
  reader.inline.ruler.before("backticks", "open_code", code);
  reader.inline.ruler.before("link", "open_link", link);
  reader.inline.ruler2.after("balance_pairs", "open_marks", emphasis);
}

function code(state, silent) {
  const rest = state.env.open ? /^(`{1,2})([^`][^]*)$/.exec(state.src.slice(state.pos, state.posMax)) : null;
  if (!rest || state.src[state.pos - 1] === "`" || new RegExp(`(?<!\`)${rest[1]}(?!\`)`).test(rest[2])) return false;
  if (!silent) state.push("code_inline", "code", 0).content = rest[2].replaceAll("\n", " ");
  state.pos = state.posMax;
  return true;
}

/** `[text](half an addr`: the text alone. */
function link(state, silent) {
  if (!state.env.open || state.src[state.pos] !== "[") return false;
  const rest = /^\[([^[\]\n]*)\]\([^()\s]*$/.exec(state.src.slice(state.pos, state.posMax));
  if (!rest) return false;
  if (!silent) state.pending += rest[1];
  state.pos = state.posMax;
  return true;
}

/** Close what is open at the end, the innermost first. */
function emphasis(state) {
  if (!state.env.open) return;
  const { delimiters, tokens } = state;
  const last = tokens.length - 1;
  const count = delimiters.length;
  for (let k = count - 1; k >= 0; k--) {
    const opener = delimiters[k];
    const pair = delimiters.findIndex((other, j) => j < k && other.end === k);
    if (pair >= 0) {
      k = pair; // what lies within a pair stays there
      continue;
    }
    if (!opener.open || opener.end !== -1 || opener.token >= last) continue;
    const token = state.push("text", "", 0);
    token.content = tokens[opener.token].content;
    opener.end = delimiters.length;
    delimiters.push({ marker: opener.marker, length: opener.length, token: state.tokens.length - 1, end: -1, open: false, close: true, jump: 0 });
  }
}
