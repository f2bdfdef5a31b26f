// The conversation on the page. A model that goes on with the user's words gets them on one sheet, as a story;
// any other gets questions and answers.
import { button, byId, copyButton, el, icon } from "./dom.js";
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
  continues = false;

  /** `actions`: { retry, goOn, edit }, called by the buttons. */
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
    this.draw();
    this.toEnd();
  }

  /** Draw everything anew. */
  draw() {
    this.#list.classList.toggle("story", this.continues);
    const exchanges = [];
    for (const turn of this.#talk.turns) {
      if (turn.role === "user" || !exchanges.length) exchanges.push([]);
      exchanges.at(-1).push(turn);
    }
    this.#answer = null;
    this.#list.replaceChildren(...exchanges.map((turns, k) => this.#exchange(turns, k === exchanges.length - 1)));
    this.#scroll.setAttribute("aria-busy", String(this.#talk.running));
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

  #exchange(turns, last) {
    const place = el("li", { class: "exchange" });
    for (const turn of turns) place.append(turn.role === "user" ? question(turn) : this.#drawAnswer(turn, place, last));
    return place;
  }

  #drawAnswer(turn, place, last) {
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
    if (!running) made.append(this.#tools(turn, last));
    if (last) this.#answer = { view, join, think, waiting };
    return made;
  }

  #tools(turn, last) {
    const tools = el("div", { class: `tools${last ? " last" : ""}` });
    if (last && this.continues && turn.text) tools.append(button("Go on", "forward", this.#actions.goOn));
    if (last) tools.append(button(this.continues ? "Another" : "Retry", "retry", this.#actions.retry));
    if (turn.text) tools.append(copyButton(() => turn.text));
    if (last) tools.append(button("Edit", "edit", this.#actions.edit));
    tools.append(el("span", { class: "account" }, account(turn)));
    return tools;
  }
}

function question(turn) {
  return el("div", { class: "question", role: "group", "aria-label": "You" }, el("p", {}, turn.text), " ");
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
