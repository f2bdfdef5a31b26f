// A conversation as plain data, so that it can be stored as it is.
//   { id, created, updated, title, turns } and, once the server keeps it, { server, items }; `lost`: it did;
//   `away`: its turns are there only
//   and `settings` (settings.js), once they were set or used
//   turn: { role: "user" | "assistant", text } and, of a question, { files: [{ name, text }] }, of an answer, { thought, finish, error, usage, seconds, first, seed }
//   and, once the server keeps it, { item, kept }: the item's id, and its text there

import { fenced } from "./files.js";
import { plain } from "./markdown.js";
import { fitting } from "./settings.js";

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
  for (const turn of conversation.turns) {
    const { role } = turn;
    const text = said(turn);
    const last = messages.at(-1);
    if (!text) continue;
    if (last?.role === role) last.content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  return messages;
}

/** The conversation as one text, for a model that knows nothing but to go on. */
export function promptOf(conversation) {
  const whole = ({ text, files = [] }) => [...files.map((file) => file.text), text].filter(Boolean).join("\n\n");
  return conversation.turns.map((turn, k) => (turn.role === "user" && k ? `\n\n${whole(turn)}` : whole(turn))).join("");
}

/** What a turn says: its files, and its words. */
export function said({ text, files = [] }) {
  return [...files.map(fenced), text].filter(Boolean).join("\n\n");
}

/** The conversation as a file: messages that other programs can read, and what only this page knows. */
export function exported(conversation) {
  const { title, created, updated, turns, settings } = conversation;
  const system = settings?.system ? [{ role: "system", content: settings.system }] : [];
  const messages = turns.map((turn) => ({ role: turn.role, content: said(turn), ...(turn.thought ? { reasoning_content: turn.thought } : {}) }));
  const file = { title, created: new Date(created).toISOString(), updated: new Date(updated).toISOString(), messages: [...system, ...messages], cellar: { settings, turns } };
  // Where a server keeps a turn is nobody else's matter.
  return JSON.stringify(file, (name, value) => (name === "item" || name === "kept" ? undefined : value), 2);
}

/** A conversation out of such a file, or out of any that has `messages` as chat APIs take them. Raises Error. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  const messages = Array.isArray(file) ? file : file?.messages;
  const turns = Array.isArray(file?.cellar?.turns) ? file.cellar.turns.map(turnOf) : (Array.isArray(messages) ? messages : []).map(messageOf);
  const found = turns.filter(Boolean);
  if (!found.length) throw new Error("it has no messages");
  const system = messages?.find?.((message) => message?.role === "system")?.content;
  const settings = file.cellar?.settings ?? (typeof system === "string" ? { system } : null);
  const time = (name) => Date.parse(file[name]) || Date.now();
  const title = typeof file.title === "string" ? file.title.slice(0, 200) : "";
  return { id: identity(), created: time("created"), updated: Date.now(), title: title || titleOf(found[0].text), turns: found, ...(settings ? { settings: fitting(settings) } : {}) };
}

/** A turn of a file as far as it is one, with its versions; else null. */
function turnOf(turn) {
  if (!["user", "assistant"].includes(turn?.role) || typeof turn.text !== "string") return null;
  const { role, text, thought, finish, error, usage, seconds, first, seed, files, fork } = turn;
  const isText = (value) => typeof value === "string";
  const isNumber = (value) => typeof value === "number";
  const made = { role, text };
  for (const [name, value, right] of [["thought", thought, isText], ["error", error, isText], ["seconds", seconds, isNumber], ["first", first, isNumber], ["seed", seed, isNumber], ["usage", usage, (value) => isNumber(value?.total_tokens) && isNumber(value.completion_tokens)]])
    if (right(value)) made[name] = value;
  if (role === "assistant") made.finish = ["stop", "length", "stopped", "error"].includes(finish) ? finish : "stop";
  if (Array.isArray(files)) made.files = files.filter((file) => isText(file?.name) && isText(file.text)).map((file) => ({ name: file.name, text: file.text }));
  if (Array.isArray(fork?.tails)) {
    const tails = fork.tails.map((tail) => (tail === null ? null : tail.map(turnOf)));
    if (tails[fork.at] === null && tails.every((tail, k) => k === fork.at || (tail?.length && tail.every(Boolean)))) made.fork = { at: fork.at, tails };
  }
  return made;
}

function messageOf(message) {
  const { role, content } = message ?? {};
  const text = Array.isArray(content) ? content.map((part) => part?.text ?? "").join("\n") : content;
  return turnOf({ role, text, thought: message?.reasoning_content });
}

/** True if all words of `query` stand somewhere in the conversation. */
export function matches(conversation, query) {
  const text = [conversation.title, ...conversation.turns.map(said)].join("\n").toLowerCase();
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
