// Puts the page together.
import { Api } from "./api.js";
import { Composer } from "./composer.js";
import { Archive, unkept } from "./archive.js";
import { merged } from "./branches.js";
import { begin, exported, imported, matches, settled } from "./conversation.js";
import { byId, el, say } from "./dom.js";
import { Drawer } from "./drawer.js";
import { Engine } from "./engine.js";
import { count } from "./format.js";
import { Gauges } from "./gauges.js";
import { Keyring } from "./keyring.js";
import { AnswerReader } from "./reader.js";
import { read, write } from "./preference.js";
import { Settings } from "./settings.js";
import { Shelf } from "./shelf.js";
import { Shortcuts } from "./shortcuts.js";
import { Store } from "./store.js";
import { Talk } from "./talk.js";
import { Transcript, welcome } from "./transcript.js";

const LOOK_EVERY = 5000; // ms
const REST = 250; // ms without a key, and the server is asked to search
const GAUGES = "cellar.gauges";
const ENDS = { stop: "Answer complete", length: "The answer has reached its longest", stopped: "Stopped" };

class Page {
  #keyring = new Keyring();
  #api = new Api(this.#keyring);
  #store = new Store();
  #archive = new Archive(this.#api);
  #asked = false; // the server was asked for what it keeps
  #archived = false; // and that is listed
  #stored = false; // this browser keeps them, too
  #found = new Set(); // ids that the server has found for what is searched
  #resting = 0;
  #memory = new Map(); // name -> where the engine has it
  #looked = -LOOK_EVERY;
  #settings = new Settings((values) => this.#set(values));
  #talks = new Map(); // id -> Talk, of every conversation
  #talk = null;
  #model = null;
  #shelfDrawer = new Drawer(byId("shelf"), byId("shelf-open"), byId("shelf-close"), "(min-width: 50rem)");
  #reader = new AnswerReader();
  #transcript = new Transcript({ goOn: () => this.#again("goOn"), retry: (k) => this.#again("retry", k), edit: (k, text) => this.#again("edit", k, text), leaf: (k, at) => this.#talk.leaf(k, at) });
  #composer = new Composer((text, files) => this.#ask(text, files), () => this.#talk.stop());
  #shelf = new Shelf({ open: (id) => this.#open(id), rename: (id) => this.#rename(id), save: (id) => this.#export(id), remove: (id) => this.#remove(id) });

  async start() {
    const engine = new Engine(this.#api);
    new Gauges(engine);
    const shown = read(GAUGES) !== "away";
    new Drawer(byId("gauges"), byId("gauges-toggle"), byId("gauges-close"), "(min-width: 75rem)", shown, (away) => write(GAUGES, away ? "away" : null));
    engine.addEventListener("status", ({ detail }) => this.#met(detail));
    engine.addEventListener("sample", () => performance.now() > this.#looked + LOOK_EVERY && this.#look());
    engine.look();
    this.#keyring.verifyWith((key) => this.#api.accepts(key));

    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the address holds the conversation
      this.#composer.focus();
    });
    byId("begin").addEventListener("click", () => this.#begin());
    byId("forget-all").addEventListener("click", () => this.#forgetAll());
    new Shortcuts({ begin: () => this.#begin(), search: () => this.#find(), editLast: () => this.#transcript.editLast() });
    byId("import").addEventListener("click", () => byId("import-field").click());
    byId("import-field").addEventListener("change", () => this.#import());
    byId("search").addEventListener("input", () => this.#search());
    byId("forget-key").addEventListener("click", () => this.#keyring.forget());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && this.#talk.running && !document.querySelector("dialog[open]")) this.#talk.stop();
    });
    addEventListener("hashchange", () => this.#talks.has(inAddress()) && this.#open(inAddress()));
    addEventListener("pagehide", () => this.#talk.running && this.#talk.save());

    this.#stored = await this.#store.open();
    if (!this.#stored) byId("shelf").querySelector(".shelf-foot").textContent = "This browser keeps no conversations: they end with this tab.";
    for (const conversation of await this.#store.all()) this.#hold(settled(conversation));
    this.#store.onChange((id) => this.#elsewhere(id));
    if (this.#talks.has(inAddress())) this.#open(inAddress(), false);
    else this.#begin();
    document.documentElement.dataset.ready = "";
  }

  // -- conversations ---------------------------------------------------------------------------

  #hold(conversation) {
    const talk = new Talk(conversation, this.#api, this.#store, this.#archive, () => this.#options(talk.conversation));
    talk.addEventListener("turns", () => this.#turns(talk));
    talk.addEventListener("text", () => this.#grew(talk));
    talk.addEventListener("end", () => this.#ended(talk));
    this.#talks.set(conversation.id, talk);
    return talk;
  }

  /** What the next answer of a conversation is asked with. */
  #options(conversation) {
    conversation.settings ??= this.#settings.values;
    return { chat: this.#model?.chat ?? true, ...this.#settings.request(conversation.settings) };
  }

  /** The settings of the open conversation were changed. */
  #set(values) {
    this.#talk.conversation.settings = values;
    if (this.#talk.turns.length && !this.#talk.running) this.#talk.save();
  }

  #begin() {
    const empty = [...this.#talks.values()].find((talk) => !talk.turns.length && !talk.conversation.away);
    this.#open((empty ?? this.#hold(begin())).conversation.id);
  }

  #open(id, focus = true) {
    this.#talk = this.#talks.get(id);
    if (this.#talk.conversation.away) this.#fetch(this.#talk);
    history.replaceState(null, "", this.#talk.turns.length ? `#${id}` : location.pathname + location.search);
    this.#transcript.show(this.#talk);
    this.#settings.show(this.#talk.conversation.settings);
    this.#draw();
    if (!focus) return;
    this.#shelfDrawer.over && this.#shelfDrawer.close();
    this.#composer.focus();
  }

  async #remove(id) {
    const talk = this.#talks.get(id);
    if (!(await confirmed("Delete this conversation?", `“${talk.conversation.title || "New conversation"}” is deleted here${talk.conversation.server ? ", on the server and from its memory" : "; it is kept nowhere else"}.`, "Delete"))) return;
    try {
      await this.#archive.remove(talk.conversation);
    } catch (error) {
      say(`It is not deleted: ${error.message}`);
      return;
    }
    talk.forget();
    this.#talks.delete(id);
    await this.#store.remove(id);
    say("Deleted");
    if (talk === this.#talk) this.#begin();
    else this.#draw();
  }

  async #forgetAll() {
    if (!(await confirmed("Delete all conversations?", "They are deleted here and on the server.", "Delete all"))) return;
    for (const talk of this.#talks.values()) {
      talk.forget();
      await this.#archive.remove(talk.conversation).catch(() => {});
    }
    this.#talks.clear();
    await this.#store.clear();
    byId("settings").close();
    say("All conversations are deleted");
    this.#begin();
  }

  async #rename(id) {
    const { conversation } = this.#talks.get(id);
    const field = byId("rename-field");
    field.value = conversation.title;
    if (!(await answered(byId("rename"))) || !field.value.trim()) return;
    conversation.title = field.value.trim();
    await this.#talks.get(id).save();
    this.#archive.rename(conversation);
    say("Renamed");
    this.#draw();
  }

  async #export(id) {
    const { conversation } = this.#talks.get(id);
    if (conversation.away) await this.#fetch(this.#talks.get(id));
    const address = URL.createObjectURL(new Blob([exported(conversation)], { type: "application/json" }));
    const link = el("a", { href: address, download: `${(conversation.title || "conversation").replace(/[^\p{L}\p{N} _-]/gu, "").slice(0, 60)}.json` });
    link.click();
    URL.revokeObjectURL(address);
    say("Exported");
  }

  async #import() {
    const field = byId("import-field");
    for (const file of field.files) {
      try {
        const { conversation } = this.#hold(imported(await file.text()));
        await this.#store.save(structuredClone(conversation)).catch(() => {});
        this.#archive.keep(conversation).then(() => this.#store.save(structuredClone(conversation)).catch(() => {}));
        this.#open(conversation.id);
        say("Imported");
      } catch (error) {
        await told("This file is no conversation", `${file.name}: ${error.message}.`);
      }
    }
    field.value = "";
  }

  /** Search, wherever the list is. */
  #find() {
    if (!this.#shelfDrawer.open) this.#shelfDrawer.toggle();
    byId("search").focus();
    byId("search").select();
  }

  /** Conversations that the server keeps and this browser does not have, or has in an older form. */
  async #list() {
    if (this.#archived) return;
    const there = await this.#archive.list();
    if (there === null) return;
    this.#archived = true;
    const mine = new Map([...this.#talks.values()].map((talk) => [talk.conversation.server, talk]));
    for (const { id, local, title, created, updated } of there) {
      const begun = this.#talks.get(local);
      if (begun && !begun.conversation.server && !begun.running) {
        begun.conversation.server = id; // the page was closed before it knew
        delete begun.conversation.lost;
        continue;
      }
      const talk = mine.get(id);
      if (!talk) this.#hold({ id, server: id, title, created, updated, turns: [], away: true });
      else if (updated > talk.conversation.updated + 2000 && !talk.running) Object.assign(talk.conversation, { title, updated, away: true });
    }
    // What the server has lost is kept here, and there again with the next turn.
    const known = new Set(there.map(({ id }) => id));
    for (const { conversation } of this.#talks.values()) {
      if (conversation.server && !known.has(conversation.server)) unkept(conversation);
    }
    // What it never had it gets now. What it had, and has no more, was deleted: that is kept again only if it goes on.
    for (const { conversation, running } of this.#talks.values()) {
      if ((conversation.server && conversation.items) || conversation.lost || running || !conversation.turns.length) continue;
      this.#archive.keep(conversation).then(() => this.#store.save(structuredClone(conversation)).catch(() => {}));
    }
    byId("shelf").querySelector(".shelf-foot").textContent = this.#stored
      ? "Conversations are kept by this server, and in this browser."
      : "This browser keeps no conversations; this server does.";
    if (this.#talks.has(inAddress()) && inAddress() !== this.#talk.conversation.id) this.#open(inAddress(), false);
    else if (this.#talk.conversation.away) this.#fetch(this.#talk);
    this.#draw();
  }

  /** Get the turns of a conversation that the server has. */
  async #fetch(talk) {
    const { conversation } = talk;
    try {
      conversation.turns = merged(conversation.turns, await this.#archive.turns(conversation.server));
    } catch (error) {
      say(`It cannot be read: ${error.message}`);
      return;
    }
    conversation.items = conversation.turns.map((turn) => turn.item);
    delete conversation.away;
    await this.#store.save(structuredClone(conversation)).catch(() => {});
    if (talk === this.#talk) this.#open(conversation.id, false);
  }

  /** Where the engine has what. */
  async #look() {
    const names = [...this.#talks.values()].filter(({ conversation }) => conversation.turns.length || conversation.away).map(({ conversation }) => conversation.server ?? conversation.id);
    if (!names.length || !this.#archived) return;
    this.#looked = performance.now();
    this.#memory = await this.#archive.memory(names);
    this.#draw();
  }

  /** Another tab has written. What runs here is newer than what it wrote. */
  async #elsewhere(id) {
    const stored = id === null ? undefined : await this.#store.one(id);
    if (id === null) for (const [held, talk] of this.#talks) talk.running || this.#talks.delete(held);
    else if (this.#talks.get(id)?.running) return;
    else if (stored) this.#talks.has(id) ? (this.#talks.get(id).conversation = stored) : this.#hold(stored);
    else this.#talks.delete(id);
    if (!this.#talks.has(this.#talk.conversation.id)) this.#talks.set(this.#talk.conversation.id, this.#talk);
    if (this.#talk.conversation.id === id) {
      this.#transcript.draw();
      this.#settings.show(this.#talk.conversation.settings);
    }
    this.#draw();
  }

  // -- turns -----------------------------------------------------------------------------------

  #ask(text, files) {
    this.#talk.ask(text, files);
    this.#transcript.toEnd();
  }

  #again(how, ...about) {
    this.#talk[how](...about);
    this.#transcript.toEnd();
    this.#composer.focus();
  }

  #turns(talk) {
    if (talk === this.#talk) {
      if (talk.turns.length) history.replaceState(null, "", `#${talk.conversation.id}`);
      this.#transcript.draw();
      if (talk.running) this.#reader.began(talk.answer.text.length);
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
    this.#looked = -LOOK_EVERY; // its memory has changed
    if (!this.#archived) this.#list();
  }

  // -- the rest --------------------------------------------------------------------------------

  #met({ model, key_required: keyRequired }) {
    const known = this.#model !== null;
    if (!this.#asked && this.#talk && (!keyRequired || this.#keyring.key)) {
      this.#asked = true;
      this.#list();
    }
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

  /** What the browser has is looked through at once, what the server alone has when the typing rests. */
  #search() {
    const query = byId("search").value.trim().slice(0, 512);
    clearTimeout(this.#resting);
    this.#found = new Set();
    this.#draw();
    if (!query || ![...this.#talks.values()].some((talk) => talk.conversation.away)) return;
    this.#resting = setTimeout(async () => {
      const found = await this.#archive.search(query);
      if (!found || byId("search").value.trim().slice(0, 512) !== query) return;
      this.#found = found;
      this.#draw();
    }, REST);
  }

  #draw() {
    const talks = [...this.#talks.values()];
    const { conversation } = this.#talk;
    const query = byId("search").value.trim();
    const kept = talks.map((talk) => talk.conversation).filter(({ turns, away }) => turns.length || away);
    const listed = query ? kept.filter((one) => matches(one, query) || (one.away && this.#found.has(one.server))) : kept;
    const running = new Set(talks.filter((talk) => talk.running).map((talk) => talk.conversation.id));
    this.#shelf.draw(listed, conversation.id, running, this.#memory);
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
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  return answered(byId("confirm"));
}

/** Say what went wrong. */
function told(title, text) {
  byId("told-title").textContent = title;
  byId("told-text").textContent = text;
  return answered(byId("told"));
}

/** Show a dialog; true if it was answered with yes. */
function answered(dialog) {
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

new Page().start();
