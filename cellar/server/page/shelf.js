// The list of conversations, by day.
import { byId, el, icon } from "./dom.js";
import { count } from "./format.js";

const CHUNK = 32; // tokens: less is the part of a chunk that is never kept
const DAY = 86_400_000;

export class Shelf {
  #place = byId("conversations");
  #actions;

  /** `actions`: { open(id), rename(id), save(id), remove(id) }. */
  constructor(actions) {
    this.#actions = actions;
  }

  /** Draw all; `running` has the ids of those that wait for an answer, `memory` says where the engine has them. The focus
      stays where it was. */
  draw(conversations, current, running, memory) {
    const held = this.#place.contains(document.activeElement) ? document.activeElement.id : null;
    const groups = Map.groupBy(conversations.toSorted((a, b) => b.updated - a.updated), ({ updated }) => day(updated));
    this.#place.replaceChildren(...[...groups].map(([name, members], k) =>
      el("section", { "aria-labelledby": `shelf-${k}` },
        el("h2", { id: `shelf-${k}` }, name),
        el("ul", {}, ...members.map((one) => this.#entry(one, one.id === current, running.has(one.id), memory.get(one.server ?? one.id)))))));
    if (held) byId(held)?.focus();
  }

  #entry({ id, title, turns }, current, running, tokens) {
    const name = title || "New conversation";
    const act = (what, label, symbol) =>
      el("button", { type: "button", id: `${what}-${id}`, class: `entry-act ${what}`, "aria-label": `${label}: ${name}`, title: label, onclick: () => this.#actions[what](id) }, icon(symbol));
    return el("li", { class: `entry${running ? " running" : ""}` },
      el("button", { type: "button", id: `open-${id}`, class: "entry-open", "aria-current": current && "true", "aria-describedby": `memory-${id}`, onclick: () => this.#actions.open(id) },
        el("span", { class: "entry-title" }, name), running ? el("span", { class: "unseen" }, ", answering") : "", el("span", { class: "entry-memory", id: `memory-${id}`, "aria-hidden": "true" }, where(tokens, turns))),
      act("rename", "Rename", "edit"), act("save", "Export", "down"), act("remove", "Delete", "trash"));
  }
}

/** Where the engine has a conversation's memory, in a few words. */
function where(tokens, turns) {
  if (!tokens) return "";
  const usage = turns.findLast((turn) => turn.usage)?.usage;
  const found = Object.entries(tokens).filter(([, held]) => held > 0);
  const held = found.reduce((sum, [, some]) => sum + some, 0);
  const dropped = Math.max((usage?.total_tokens ?? 0) - held, 0);
  const parts = found.map(([tier, some]) => `${count(some)} on ${tier}`);
  if (held && dropped >= CHUNK) parts.push(`${count(dropped)} dropped`);
  return parts.length ? parts.join(", ") : "not in memory";
}

function day(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 6 * DAY) return "This week";
  return "Earlier";
}
