// How the model answers in a conversation, and how the page looks. What was set last is kept in localStorage: a new
// conversation begins with it.
import { byId } from "./dom.js";
import { read, write } from "./preference.js";

const NAME = "cellar.settings";
const THEME = "cellar.theme";
const SAMPLERS = { temperature: 0.8, top_p: 0.95, top_k: null, min_p: null, presence_penalty: null, frequency_penalty: null, repetition_penalty: null, min_tokens: null, max_tokens: null, seed: null };
const DEFAULTS = { system: "", stop: "", ...SAMPLERS };
const FIELDS = Object.keys(DEFAULTS);

export class Settings {
  #form = byId("settings-form");
  #dialog = byId("settings");
  #values = { ...DEFAULTS, ...fitting(kept()) };
  #longest = 512;
  #changed;

  /** `changed(values)` is called with what was set. */
  constructor(changed) {
    this.#changed = changed;
    byId("settings-open").addEventListener("click", () => this.#dialog.showModal());
    byId("reset").addEventListener("click", () => {
      this.#values = { ...DEFAULTS };
      this.#keep();
      this.#fill();
    });
    for (const name of FIELDS) this.#form.elements[name].addEventListener("input", () => this.#take(name));
    for (const radio of this.#form.elements.theme) radio.addEventListener("change", () => paint(radio.value));
    // A click on what lies behind closes it, as people expect; Escape does so by itself.
    this.#dialog.addEventListener("click", (event) => event.target === this.#dialog && this.#dialog.close());
    this.#fill();
  }

  /** Suit the model: how long an answer may be by default, and whether a system prompt reaches it. */
  suit({ max_model_len, reads_system }) {
    this.#longest = Math.min(Math.max(Math.floor(max_model_len / 8), 64), 4096);
    const { max_tokens, system } = this.#form.elements;
    max_tokens.max = max_model_len;
    max_tokens.placeholder = this.#longest;
    system.disabled = !reads_system;
    byId("system-note").textContent = reads_system ? "Stands before this conversation." : "This model has no place for one.";
  }

  /** The values shown, as they can be stored. */
  get values() {
    return { ...this.#values };
  }

  /** Show the values of a conversation; null: it has none yet, and begins with what was set last. */
  show(values) {
    this.#values = { ...DEFAULTS, ...fitting(values ?? kept()) };
    this.#fill();
  }

  /** What a conversation's values ask of the server: { system, body }. */
  request(values) {
    const { system, stop, max_tokens, ...samplers } = { ...DEFAULTS, ...fitting(values) };
    const set = Object.entries(samplers).filter(([, value]) => value !== null);
    const stops = stop.split("\n").filter(Boolean);
    const body = { ...Object.fromEntries(set), max_tokens: max_tokens ?? this.#longest, ...(stops.length ? { stop: stops } : {}) };
    return { system: this.#form.elements.system.disabled ? "" : system, body };
  }

  #take(name) {
    const field = this.#form.elements[name];
    if (!field.checkValidity()) return field.reportValidity();
    this.#values[name] = field.type === "textarea" ? field.value : field.value === "" ? null : field.valueAsNumber;
    this.#keep();
    this.#tell(name);
  }

  #fill() {
    for (const name of FIELDS) {
      this.#form.elements[name].value = this.#values[name] ?? "";
      this.#tell(name);
    }
    this.#form.elements.theme.value = document.documentElement.dataset.theme ?? "auto";
  }

  #tell(name) {
    const shown = byId(`${name}-value`);
    if (shown) shown.value = this.#values[name].toFixed(2);
  }

  #keep() {
    write(NAME, JSON.stringify(this.#values));
    this.#changed(this.values);
  }
}

function paint(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write(THEME, theme === "auto" ? null : theme);
}

function kept() {
  try {
    return JSON.parse(read(NAME)) ?? {};
  } catch {
    return {};
  }
}

/** Of some values those that are of the right kind. */
export function fitting(values) {
  const fits = ([name, value]) => name in DEFAULTS && (typeof value === (typeof DEFAULTS[name] === "string" ? "string" : "number") || value === DEFAULTS[name]);
  return Object.fromEntries(Object.entries(values ?? {}).filter(fits));
}
