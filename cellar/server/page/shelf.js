// The list of conversations, by day.
import { byId, el, icon } from "./dom.js";

const DAY = 86_400_000;

export class Shelf {
  #place = byId("conversations");
  #actions;

  /** `actions`: { open(id), remove(id) }. */
  constructor(actions) {
    this.#actions = actions;
  }

  /** Draw all; `running` has the ids of those that wait for an answer. The focus stays where it was. */
  draw(conversations, current, running) {
    const held = this.#place.contains(document.activeElement) ? document.activeElement.id : null;
    const groups = Map.groupBy(conversations.toSorted((a, b) => b.updated - a.updated), ({ updated }) => day(updated));
    this.#place.replaceChildren(...[...groups].map(([name, members], k) =>
      el("section", { "aria-labelledby": `shelf-${k}` },
        el("h2", { id: `shelf-${k}` }, name),
        el("ul", {}, ...members.map((one) => this.#entry(one, one.id === current, running.has(one.id)))))));
    if (held) byId(held)?.focus();
  }

  #entry({ id, title }, current, running) {
    const name = title || "New conversation";
    return el("li", { class: `entry${running ? " running" : ""}` },
      el("button", { type: "button", id: `open-${id}`, class: "entry-open", "aria-current": current && "true", onclick: () => this.#actions.open(id) },
        el("span", { class: "entry-title" }, name), running ? el("span", { class: "unseen" }, ", answering") : ""),
      el("button", { type: "button", id: `remove-${id}`, class: "entry-remove", "aria-label": `Delete: ${name}`, title: "Delete", onclick: () => this.#actions.remove(id) }, icon("trash")));
  }
}

function day(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 6 * DAY) return "This week";
  return "Earlier";
}
