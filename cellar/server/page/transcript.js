// The conversation on the page. A model that goes on with the user's words gets them on one sheet, as a story;
// any other gets questions and answers.
import { button, byId, copyButton, el, icon } from "./dom.js";
import { editor } from "./editor.js";
import { count, rate, seconds } from "./format.js";
import { MarkdownView } from "./render.js";

const NEAR = 60; // pixels from the end that still count as the end

export class Transcript {
  #list = byId("exchanges");
  #scroll = byId("scroll");
  #latest = byId("latest");
  #talk = null;
  #actions;
  #answer = null; // the last answer's elements
  #frame = 0;
  #pinned = true;
  #editing = -1; // the turn that is being edited
  #drawn = new WeakMap(); // first turn -> its exchange's element and what that shows: most of a long conversation stays
  continues = false;

  /** `actions`: { goOn(), retry(k), edit(k, text), leaf(k, at) }, called by the buttons; k counts turns. */
  constructor(actions) {
    this.#actions = actions;
    this.#scroll.addEventListener("scroll", () => this.#look(), { passive: true });
    this.#latest.addEventListener("click", () => {
      this.toEnd();
      byId("ask").focus();
    });
    // An answer's lines wrap anew when the window changes; who was at its end stays there.
    new ResizeObserver(() => this.#pinned && this.toEnd()).observe(this.#list);
  }

  /** Show a talk from its beginning. */
  show(talk) {
    this.#talk = talk;
    this.#editing = -1;
    this.draw();
    this.toEnd();
  }

  /** Draw what has changed. The focus stays where it was. */
  draw() {
    const held = this.#list.contains(document.activeElement) ? document.activeElement.id : null;
    this.#list.classList.toggle("story", this.continues);
    this.#list.classList.toggle("busy", this.#talk.running);
    const exchanges = [];
    this.#talk.turns.forEach((turn, k) => {
      if (turn.role === "user" || !exchanges.length) exchanges.push([]);
      exchanges.at(-1).push([turn, k]);
    });
    this.#answer = null;
    exchanges.forEach((turns, k) => {
      const place = this.#place(turns, k === exchanges.length - 1);
      if (this.#list.children[k] !== place) this.#list.insertBefore(place, this.#list.children[k] ?? null);
    });
    while (this.#list.childElementCount > exchanges.length) this.#list.lastChild.remove();
    this.#scroll.setAttribute("aria-busy", String(this.#talk.running));
    if (held) byId(held)?.focus();
  }

  /** The last answer grew; it is drawn with the next frame. */
  grew() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#write();
    });
  }

  /** The last answer ended. */
  ended() {
    this.#write();
    this.draw();
    if (this.#pinned) this.toEnd();
  }

  toEnd() {
    this.#pinned = true;
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#look();
  }

  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroll;
    this.#pinned = scrollHeight - scrollTop - clientHeight < NEAR;
    this.#latest.hidden = this.#pinned;
  }

  #write() {
    const turn = this.#talk?.answer;
    if (!turn || !this.#answer) return;
    this.#answer.think(turn);
    this.#answer.join(turn.text);
    this.#answer.view.update(turn.text, this.#talk.running);
    if (turn.text || turn.thought) this.#answer.waiting.remove();
    if (this.#pinned) this.toEnd();
    else this.#look();
  }

  /** The element of an exchange: the one that shows it already, or a new one. */
  #place(turns, last) {
    const running = last && this.#talk.running;
    const shown = turns.map(([turn, k]) => [k, turn.role, turn.text, turn.thought, turn.finish, turn.error, turn.fork && [turn.fork.at, turn.fork.tails.length], k === this.#editing]);
    const state = JSON.stringify([last, running, this.continues, shown]);
    const [[first]] = turns;
    const before = this.#drawn.get(first);
    if (before?.state === state && !running) return before.place;
    const place = this.#exchange(turns, last);
    this.#drawn.set(first, { place, state });
    return place;
  }

  #exchange(turns, last) {
    const place = el("li", { class: "exchange" });
    for (const [turn, k] of turns) place.append(turn.role === "user" ? this.#question(turn, k) : this.#drawAnswer(turn, k, place, last));
    return place;
  }

  #question(turn, k) {
    const made = el("div", { class: "question", role: "group", "aria-label": "You" });
    if (k === this.#editing) {
      const form = editor(turn.text, (text) => this.#edited(() => this.#actions.edit(k, text)), () => this.#edited());
      made.append(form);
      return made;
    }
    for (const file of turn.files ?? []) made.append(el("details", { class: "file" }, el("summary", {}, file.name), el("pre", { tabindex: "0", role: "region", "aria-label": file.name }, file.text)));
    if (turn.text) made.append(el("p", {}, turn.text), " ");
    if (!this.continues) made.append(el("div", { class: "tools" }, this.#editButton(k), ...this.#versions(turn, k, "message")));
    return made;
  }

  #editButton(k) {
    return button("Edit", "edit", () => {
      this.#editing = k;
      this.draw();
      this.#list.querySelector(".edit-field").focus();
    }, { id: `edit-${k}`, class: "tool turn-act" });
  }

  /** Edit the last question. */
  editLast() {
    const k = this.#talk.turns.findLastIndex((turn) => turn.role === "user");
    if (k >= 0 && !this.#talk.running) byId(`edit-${k}`)?.click();
  }

  /** The editing of a turn is over. */
  #edited(then = null) {
    const k = this.#editing;
    this.#editing = -1;
    if (then) return then();
    this.draw();
    byId(`edit-${k}`)?.focus();
  }

  /** Which version of a turn is shown, and how to get to the others. */
  #versions({ fork }, k, what) {
    if (!fork) return [];
    const { at, tails } = fork;
    const turn = (name, symbol, to) =>
      button(name, symbol, () => this.#actions.leaf(k, to), { bare: true, id: `${symbol}-${k}`, "aria-disabled": !(to in tails) && "true" });
    return [el("span", { class: "versions turn-act", role: "group", "aria-label": `Versions of this ${what}` },
      turn("Older version", "older", at - 1), el("span", {}, `${at + 1} / ${tails.length}`), turn("Newer version", "newer", at + 1))];
  }

  #drawAnswer(turn, k, place, last) {
    const running = last && this.#talk.running;
    const prose = el("div", { class: "prose" });
    const view = new MarkdownView(prose);
    const join = (text) => place.classList.toggle("joined", !/^\s*\n/.test(text));
    join(turn.text);
    view.update(turn.text, running);
    const waiting = el("p", { class: "thinking" }, el("span", { class: "unseen" }, "Waiting for the first word"), el("i"), el("i"), el("i"));
    const thought = el("p");
    const fold = el("details", { class: "thought" }, el("summary", {}, "Thought"), thought);
    const think = ({ thought: text = "" }) => {
      fold.hidden = !text;
      thought.textContent = text;
    };
    think(turn);
    const made = el("div", { class: `answer${running ? " running" : ""}`, role: "group", "aria-label": "Answer" }, fold, prose);
    if (running && !turn.text && !turn.thought) made.append(waiting);
    if (turn.finish === "error") made.append(el("p", { class: "failure" }, turn.error));
    if (!running) made.append(this.#tools(turn, k, last));
    if (last) this.#answer = { view, join, think, waiting };
    return made;
  }

  #tools(turn, k, last) {
    const tools = el("div", { class: `tools${last ? " last" : ""}` });
    if (last && this.continues && turn.text) tools.append(button("Go on", "forward", this.#actions.goOn));
    tools.append(button(this.continues ? "Another" : "Retry", "retry", () => this.#actions.retry(k), { id: `retry-${k}`, class: "tool turn-act" }));
    if (turn.text) tools.append(copyButton(() => turn.text));
    tools.append(...this.#versions(turn, k, "answer"));
    const question = this.#talk.turns[k - 1];
    // In a story the words of both stand in one text, and so do their tools below it.
    if (this.continues && question?.role === "user") tools.append(this.#editButton(k - 1), ...this.#versions(question, k - 1, "line"));
    tools.append(el("span", { class: "account" }, account(turn)));
    return tools;
  }
}

/** What an answer cost, in a line. */
function account({ finish, usage, seconds: time, first, seed }) {
  const parts = [];
  if (finish === "stopped") parts.push("stopped");
  if (usage && time) {
    const made = usage.completion_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${finish === "length" ? "cut at " : ""}${count(made)} tokens`);
    if (made > 1 && first !== null && time > first) parts.push(`${rate((made - 1) / (time - first))}/s`);
    if (cached) parts.push(`${count(cached)} from cache`);
  }
  if (first) parts.push(`first after ${seconds(first)}`);
  if (seed !== undefined && finish !== "error") parts.push(`seed ${seed}`);
  return parts.join(" · ");
}

/** A word of welcome, and openings to pick from. */
export function welcome(model, pick) {
  const { continues, name } = model;
  const openings = ["Once upon a time", "The old fox looked at the moon and", "One morning a boy named Tom found a golden key", "Deep in the forest there stood a house with no door,"];
  const title = continues ? "Begin a story" : "What is on your mind?";
  const text = continues
    ? "This model goes on with whatever you write. Give it a first line, and take turns."
    : `${name} answers here, on this machine.`;
  return [
    el("div", { class: "welcome-mark", "aria-hidden": "true" }, icon("cellar")),
    el("h2", {}, title),
    el("p", {}, text),
    ...(continues ? [el("div", { class: "openings" }, ...openings.map((line) => el("button", { type: "button", onclick: () => pick(line) }, `${line} …`)))] : []),
  ];
}
