// How the model answers, and how the page looks; kept in localStorage.
import { byId } from "./dom.js";
import { read, write } from "./preference.js";

const NAME = "cellar.settings";
const THEME = "cellar.theme";
const DEFAULTS = { system: "", temperature: 0.8, top_p: 0.95, max_tokens: null, seed: null };
const FIELDS = Object.keys(DEFAULTS);

export class Settings {
  #form = byId("settings-form");
  #dialog = byId("settings");
  #values = { ...DEFAULTS, ...stored() };
  #longest = 512;

  constructor() {
    byId("settings-open").addEventListener("click", () => this.#dialog.showModal());
    byId("reset").addEventListener("click", () => {
      this.#values = { ...DEFAULTS };
      this.#keep();
      this.#show();
    });
    for (const name of FIELDS) this.#form.elements[name].addEventListener("input", () => this.#take(name));
    for (const radio of this.#form.elements.theme) radio.addEventListener("change", () => paint(radio.value));
    // A click on what lies behind closes it, as people expect; Escape does so by itself.
    this.#dialog.addEventListener("click", (event) => event.target === this.#dialog && this.#dialog.close());
    this.#show();
  }

  /** Suit the model: how long an answer may be by default, and whether a system prompt reaches it. */
  suit({ max_model_len, reads_system }) {
    this.#longest = Math.min(Math.max(Math.floor(max_model_len / 8), 64), 4096);
    const { max_tokens, system } = this.#form.elements;
    max_tokens.max = max_model_len;
    max_tokens.placeholder = this.#longest;
    system.disabled = !reads_system;
    byId("system-note").textContent = reads_system
      ? "Stands before every conversation."
      : "This model has no place for one.";
  }

  get system() {
    return this.#form.elements.system.disabled ? "" : this.#values.system;
  }

  /** The fields of a request. */
  get body() {
    const { temperature, top_p, max_tokens, seed } = this.#values;
    const body = { temperature, top_p, max_tokens: max_tokens ?? this.#longest };
    return seed === null ? body : { ...body, seed };
  }

  #take(name) {
    const field = this.#form.elements[name];
    if (!field.checkValidity()) return field.reportValidity();
    this.#values[name] = field.type === "textarea" ? field.value : field.value === "" ? null : field.valueAsNumber;
    this.#keep();
    this.#tell(name);
  }

  #show() {
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
  }
}

function paint(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write(THEME, theme === "auto" ? null : theme);
}

/** What was kept, as far as it is of the right kind. */
function stored() {
  let values;
  try {
    values = JSON.parse(read(NAME)) ?? {};
  } catch {
    return {};
  }
  const fits = ([name, value]) => name in DEFAULTS && (typeof value === (typeof DEFAULTS[name] === "string" ? "string" : "number") || value === DEFAULTS[name]);
  return Object.fromEntries(Object.entries(values).filter(fits));
}
