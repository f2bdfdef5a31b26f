// A conversation as plain data, so that it can be stored as it is.
//   { id, created, updated, title, turns } and, once the server keeps it, { server, items }; `lost`: it did;
//   `away`: its turns are there only
//   turn: { role: "user" | "assistant", text } and, of an answer, { thought, finish, error, usage, seconds, first, seed }
//   and, once the server keeps it, { item, kept }: the item's id, and its text there

import { plain } from "./markdown.js";

const LONGEST_TITLE = 60;

export function begin() {
  const now = Date.now();
  return { id: identity(), created: now, updated: now, title: "", turns: [] };
}

/** What the user began with, on one line and without marks. */
export function titleOf(text) {
  const line = plain(text) || text.trim().replace(/\s+/g, " ");
  if (line.length <= LONGEST_TITLE) return line;
  const cut = line.slice(0, LONGEST_TITLE);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 20 ? cut.lastIndexOf(" ") : LONGEST_TITLE)}…`;
}

/** The conversation as the API takes it. Answers that never came are left out, and questions that then meet are one. */
export function messagesOf(conversation, system = "") {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  for (const { role, text } of conversation.turns) {
    const last = messages.at(-1);
    if (!text) continue;
    if (last?.role === role) last.content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  return messages;
}

/** The conversation as one text, for a model that knows nothing but to go on. */
export function promptOf(conversation) {
  return conversation.turns.map(({ role, text }, k) => (role === "user" && k ? `\n\n${text}` : text)).join("");
}

/** The conversation as a file that other programs can read. */
export function exported(conversation) {
  const { title, created, updated, turns } = conversation;
  const messages = turns.map(({ role, text, thought }) => ({ role, content: text, ...(thought ? { reasoning_content: thought } : {}) }));
  return JSON.stringify({ title, created: new Date(created).toISOString(), updated: new Date(updated).toISOString(), messages }, null, 2);
}

/** True if all words of `query` stand somewhere in the conversation. */
export function matches(conversation, query) {
  const text = [conversation.title, ...conversation.turns.map((turn) => turn.text)].join("\n").toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** Answers that a closed page cut off are as if they had been stopped. */
export function settled(conversation) {
  for (const turn of conversation.turns) if (turn.role === "assistant" && !turn.finish) turn.finish = "stopped";
  return conversation;
}

function identity() {
  // randomUUID is for secure contexts only, and a server in the house seldom is one.
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
