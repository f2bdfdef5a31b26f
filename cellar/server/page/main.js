// Puts the page together.
import { Api } from "./api.js";
import { Composer } from "./composer.js";
import { begin, settled } from "./conversation.js";
import { byId, say } from "./dom.js";
import { Drawer } from "./drawer.js";
import { Engine } from "./engine.js";
import { count } from "./format.js";
import { Gauges } from "./gauges.js";
import { Keyring } from "./keyring.js";
import { AnswerReader } from "./reader.js";
import { read, write } from "./preference.js";
import { Settings } from "./settings.js";
import { Shelf } from "./shelf.js";
import { Store } from "./store.js";
import { Talk } from "./talk.js";
import { Transcript, welcome } from "./transcript.js";

const GAUGES = "cellar.gauges";
const ENDS = { stop: "Answer complete", length: "The answer has reached its longest", stopped: "Stopped" };

class Page {
  #keyring = new Keyring();
  #api = new Api(this.#keyring);
  #store = new Store();
  #settings = new Settings();
  #talks = new Map(); // id -> Talk, of every conversation
  #talk = null;
  #model = null;
  #shelfDrawer = new Drawer(byId("shelf"), byId("shelf-open"), byId("shelf-close"), "(min-width: 50rem)");
  #reader = new AnswerReader();
  #transcript = new Transcript({ retry: () => this.#again("retry"), goOn: () => this.#again("goOn"), edit: () => this.#edit() });
  #composer = new Composer((text) => this.#ask(text), () => this.#talk.stop());
  #shelf = new Shelf({ open: (id) => this.#open(id), remove: (id) => this.#remove(id) });

  async start() {
    const engine = new Engine(this.#api);
    new Gauges(engine);
    const shown = read(GAUGES) !== "away";
    new Drawer(byId("gauges"), byId("gauges-toggle"), byId("gauges-close"), "(min-width: 75rem)", shown, (away) => write(GAUGES, away ? "away" : null));
    engine.addEventListener("status", ({ detail }) => this.#met(detail));
    engine.look();
    this.#keyring.verifyWith((key) => this.#api.accepts(key));

    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the address holds the conversation
      this.#composer.focus();
    });
    byId("begin").addEventListener("click", () => this.#begin());
    byId("forget-all").addEventListener("click", () => this.#forgetAll());
    byId("forget-key").addEventListener("click", () => this.#keyring.forget());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && this.#talk.running && !document.querySelector("dialog[open]")) this.#talk.stop();
    });
    addEventListener("hashchange", () => this.#talks.has(inAddress()) && this.#open(inAddress()));
    addEventListener("pagehide", () => this.#talk.running && this.#talk.save());

    if (!(await this.#store.open())) byId("shelf").querySelector(".shelf-foot").textContent = "This browser keeps no conversations: they end with this tab.";
    for (const conversation of await this.#store.all()) this.#hold(settled(conversation));
    this.#store.onChange((id) => this.#elsewhere(id));
    if (this.#talks.has(inAddress())) this.#open(inAddress(), false);
    else this.#begin();
    document.documentElement.dataset.ready = "";
  }

  // -- conversations ---------------------------------------------------------------------------

  #hold(conversation) {
    const talk = new Talk(conversation, this.#api, this.#store, () => ({ chat: this.#model?.chat ?? true, system: this.#settings.system, body: this.#settings.body }));
    talk.addEventListener("turns", () => this.#turns(talk));
    talk.addEventListener("text", () => this.#grew(talk));
    talk.addEventListener("end", () => this.#ended(talk));
    this.#talks.set(conversation.id, talk);
    return talk;
  }

  #begin() {
    const empty = [...this.#talks.values()].find((talk) => !talk.turns.length);
    this.#open((empty ?? this.#hold(begin())).conversation.id);
  }

  #open(id, focus = true) {
    this.#talk = this.#talks.get(id);
    history.replaceState(null, "", this.#talk.turns.length ? `#${id}` : location.pathname + location.search);
    this.#transcript.show(this.#talk);
    this.#draw();
    if (!focus) return;
    this.#shelfDrawer.over && this.#shelfDrawer.close();
    this.#composer.focus();
  }

  async #remove(id) {
    const talk = this.#talks.get(id);
    if (!(await confirmed("Delete this conversation?", `“${talk.conversation.title || "New conversation"}” is kept nowhere else.`, "Delete"))) return;
    talk.forget();
    this.#talks.delete(id);
    await this.#store.remove(id);
    say("Deleted");
    if (talk === this.#talk) this.#begin();
    else this.#draw();
  }

  async #forgetAll() {
    if (!(await confirmed("Delete all conversations?", "They are kept nowhere else.", "Delete all"))) return;
    for (const talk of this.#talks.values()) talk.forget();
    this.#talks.clear();
    await this.#store.clear();
    byId("settings").close();
    say("All conversations are deleted");
    this.#begin();
  }

  /** Another tab has written. What runs here is newer than what it wrote. */
  async #elsewhere(id) {
    const stored = id === null ? undefined : await this.#store.one(id);
    if (id === null) for (const [held, talk] of this.#talks) talk.running || this.#talks.delete(held);
    else if (this.#talks.get(id)?.running) return;
    else if (stored) this.#talks.has(id) ? (this.#talks.get(id).conversation = stored) : this.#hold(stored);
    else this.#talks.delete(id);
    if (!this.#talks.has(this.#talk.conversation.id)) this.#talks.set(this.#talk.conversation.id, this.#talk);
    if (this.#talk.conversation.id === id) this.#transcript.draw();
    this.#draw();
  }

  // -- turns -----------------------------------------------------------------------------------

  #ask(text) {
    this.#talk.ask(text);
    this.#transcript.toEnd();
  }

  #again(how) {
    this.#talk[how]();
    this.#composer.focus();
  }

  async #edit() {
    this.#composer.text = await this.#talk.takeBack();
    this.#composer.focus();
  }

  #turns(talk) {
    if (talk === this.#talk) {
      if (talk.turns.length) history.replaceState(null, "", `#${talk.conversation.id}`);
      this.#transcript.draw();
      if (talk.running) this.#reader.began(talk.answer.text.length);
      this.#transcript.toEnd();
    }
    this.#draw();
  }

  #grew(talk) {
    if (talk !== this.#talk) return;
    this.#transcript.grew();
    this.#reader.grew(talk.answer.text);
  }

  #ended(talk) {
    if (talk === this.#talk) {
      this.#transcript.ended();
      this.#reader.ended(talk.answer.text, talk.answer.error ?? ENDS[talk.answer.finish] ?? "Answer complete");
    } else say(`An answer in “${talk.conversation.title}” has ended`);
    this.#draw();
  }

  // -- the rest --------------------------------------------------------------------------------

  #met({ model, key_required: keyRequired }) {
    const known = this.#model !== null;
    this.#model = model;
    byId("forget-key").hidden = !this.#keyring.key;
    if (known) return;
    this.#settings.suit(model);
    this.#composer.placeholder = model.continues ? "Write, and the model goes on" : `Write to ${model.name}`;
    this.#transcript.continues = model.continues;
    if (this.#talk) {
      this.#transcript.draw();
      this.#draw();
    }
    if (keyRequired && !this.#keyring.key) this.#keyring.ask();
  }

  #draw() {
    const talks = [...this.#talks.values()];
    const { conversation } = this.#talk;
    const listed = talks.filter((talk) => talk.turns.length).map((talk) => talk.conversation);
    const running = new Set(talks.filter((talk) => talk.running).map((talk) => talk.conversation.id));
    this.#shelf.draw(listed, conversation.id, running);
    this.#composer.running = this.#talk.running;
    const title = conversation.title || "New conversation";
    byId("title").textContent = title;
    document.title = conversation.title ? `${title} · Cellar` : "Cellar";
    byId("welcome").hidden = conversation.turns.length > 0;
    if (!conversation.turns.length && this.#model) byId("welcome").replaceChildren(...welcome(this.#model, (line) => this.#ask(line)));
    this.#room(this.#talk.answer?.usage);
  }

  /** How much of the model's context the conversation fills. */
  #room(usage) {
    byId("room").hidden = !usage || !this.#model;
    if (!usage || !this.#model) return;
    const { total_tokens: used } = usage;
    const all = this.#model.max_model_len;
    byId("room-text").textContent = `${count(used)} of ${count(all)} tokens`;
    byId("room-fill").style.width = `${Math.min((100 * used) / all, 100)}%`;
    byId("room").classList.toggle("tight", used > 0.85 * all);
  }
}

function inAddress() {
  return location.hash.slice(1);
}

/** Ask before something is lost. */
function confirmed(title, text, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

new Page().start();
