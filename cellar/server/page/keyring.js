// The API key: asked for when the server wants one, kept for this tab only.
import { byId } from "./dom.js";
import { read, write } from "./preference.js";

const NAME = "cellar.key";

export class Keyring {
  #dialog = byId("key");
  #field = byId("key-field");
  #wrong = byId("key-wrong");
  #asked = null;
  #check = async () => true;
  key = read(NAME, "sessionStorage");

  constructor() {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#take(this.#field.value.trim());
    });
    byId("key-cancel").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => this.#asked?.resolve(Boolean(this.key)));
  }

  /** `check` says whether the server takes a key. */
  verifyWith(check) {
    this.#check = check;
  }

  /** Ask for a key; true once there is one. `refused`: the one there was is not taken. */
  ask(refused = false) {
    if (this.#asked) return this.#asked.promise;
    if (refused) this.forget();
    this.#wrong.textContent = refused ? "The server does not accept this key." : "";
    this.#field.value = "";
    this.#asked = Promise.withResolvers();
    this.#dialog.showModal();
    this.#field.focus();
    return this.#asked.promise.finally(() => (this.#asked = null));
  }

  forget() {
    this.key = null;
    write(NAME, null, "sessionStorage");
  }

  async #take(key) {
    this.#wrong.textContent = "";
    let accepted;
    try {
      accepted = await this.#check(key);
    } catch {
      this.#wrong.textContent = "The server cannot be reached.";
      return;
    }
    if (accepted) {
      this.key = key;
      write(NAME, key, "sessionStorage");
      this.#dialog.close();
    } else {
      this.#wrong.textContent = "The server does not accept this key.";
      this.#field.select();
    }
  }
}
