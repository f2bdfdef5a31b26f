// One conversation that is open in this page, and the answer that it may be waiting for.
// Events: "turns" (some were added or taken away), "text" (the answer grew), "end" (the answer ended).
import { ApiError } from "./api.js";
import { branch, leaf } from "./branches.js";
import { messagesOf, promptOf, titleOf } from "./conversation.js";

const SAVE_EVERY = 1000; // ms
const SEEDS = 1_000_000; // few enough to be read aloud

export class Talk extends EventTarget {
  #api;
  #store;
  #archive;
  #options;
  #stopper = null;
  #saved = 0;
  #forgotten = false;

  /** `options()` gives { chat, system, body } for the next answer: whether the model takes messages, the system
      prompt, and the sampling fields. */
  constructor(conversation, api, store, archive, options) {
    super();
    this.conversation = conversation;
    this.#api = api;
    this.#store = store;
    this.#archive = archive;
    this.#options = options;
  }

  get running() {
    return this.#stopper !== null;
  }

  get turns() {
    return this.conversation.turns;
  }

  /** The last turn, if it is an answer. */
  get answer() {
    const last = this.turns.at(-1);
    return last?.role === "assistant" ? last : null;
  }

  /** Ask; the answer comes in events. */
  async ask(text, files = []) {
    if (this.running) return;
    this.conversation.title ||= titleOf(text || files[0].name);
    this.turns.push({ role: "user", text, ...(files.length ? { files } : {}) }, { role: "assistant", text: "" });
    await this.#run();
  }

  /** Answer anew at turn `k`; an answer that was there stays as a version, a failure does not. */
  async retry(k = this.turns.length - 1) {
    const turn = this.turns[k];
    if (this.running || turn?.role !== "assistant") return;
    const fresh = { role: "assistant", text: "" };
    if (k === this.turns.length - 1 && !turn.text && !turn.thought) this.turns[k] = turn.fork ? { ...fresh, fork: turn.fork } : fresh;
    else branch(this.turns, k, [fresh]);
    await this.#run();
  }

  /** Ask something else at turn `k`; the question that was there stays as a version, with all that followed. */
  async edit(k, text) {
    if (this.running || this.turns[k]?.role !== "user") return;
    const { files } = this.turns[k];
    branch(this.turns, k, [{ role: "user", text, ...(files ? { files } : {}) }, { role: "assistant", text: "" }]);
    await this.#run();
  }

  /** Show version `at` of turn `k`. */
  async leaf(k, at) {
    if (this.running || !this.turns[k]?.fork?.tails[at]) return;
    leaf(this.turns, k, at);
    this.#tell("turns");
    await this.save();
    await this.#archive.keep(this.conversation);
    await this.save();
  }

  /** Let the model go on where its answer ended. */
  async goOn() {
    if (this.running || !this.answer?.text) return;
    for (const field of ["finish", "error", "usage"]) delete this.answer[field];
    await this.#run();
  }

  stop() {
    this.#stopper?.abort();
  }

  /** Stop, and keep nothing from now on. */
  forget() {
    this.#forgotten = true;
    this.stop();
  }

  async save() {
    if (this.#forgotten) return;
    this.#saved = performance.now();
    this.conversation.updated = Date.now();
    await this.#store.save(structuredClone(this.conversation)).catch(() => {});
  }

  async #run() {
    const answer = this.answer;
    const stopper = (this.#stopper = new AbortController());
    const { chat, system, body } = this.#options();
    answer.seed = body.seed ?? Math.floor(Math.random() * SEEDS);
    this.#tell("turns");
    const begun = performance.now();
    let first = null;
    try {
      await this.#archive.begin(this.conversation);
      await this.save();
      const said = chat ? { messages: messagesOf(this.conversation, system) } : { prompt: promptOf(this.conversation) };
      const request = { ...body, ...said, seed: answer.seed, prompt_cache_key: this.conversation.server ?? this.conversation.id };
      for await (const piece of this.#api.answer(request, stopper.signal)) {
        if (piece.thought) {
          answer.thought = (answer.thought ?? "") + piece.thought;
          this.#tell("text");
        }
        if (piece.text) {
          first ??= performance.now();
          answer.text += piece.text;
          this.#tell("text");
          if (performance.now() - this.#saved > SAVE_EVERY) this.save();
        }
        if (piece.finish) answer.finish = piece.finish;
        if (piece.usage) answer.usage = piece.usage;
      }
      if (!answer.finish) throw new ApiError(0, "The answer broke off: the server closed the connection.");
    } catch (error) {
      if (stopper.signal.aborted) answer.finish = "stopped";
      else Object.assign(answer, { finish: "error", error: inWords(error) });
    }
    answer.first = first === null ? null : (first - begun) / 1000;
    answer.seconds = (performance.now() - begun) / 1000;
    this.#stopper = null;
    this.#tell("end");
    await this.save(); // the server may take its time, and the page may be closed meanwhile
    if (!this.#forgotten) await this.#archive.keep(this.conversation);
    await this.save();
  }

  #tell(what) {
    this.dispatchEvent(new Event(what));
  }
}

function inWords(error) {
  if (error instanceof ApiError) {
    const later = error.retryAfter ? ` It may work again in ${error.retryAfter} s.` : "";
    return error.message.charAt(0).toUpperCase() + error.message.slice(1) + later;
  }
  return error instanceof TypeError ? "The server cannot be reached." : `The page failed: ${error.message}`;
}
