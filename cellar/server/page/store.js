// Conversations in IndexedDB. Where the browser forbids it they live as long as the page.

const STORE = "conversations";

export class Store {
  #database = null;
  #channel = "BroadcastChannel" in window ? new BroadcastChannel("cellar") : null;

  /** Open it; false if nothing can be kept. */
  async open() {
    try {
      const request = indexedDB.open("cellar", 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      this.#database = await promised(request);
    } catch {
      return false;
    }
    return true;
  }

  /** All of them. */
  async all() {
    return this.#database ? promised(this.#read().getAll()) : [];
  }

  async one(id) {
    return this.#database ? promised(this.#read().get(id)) : undefined;
  }

  async save(conversation) {
    await this.#write((store) => store.put(conversation), conversation.id);
  }

  async remove(id) {
    await this.#write((store) => store.delete(id), id);
  }

  async clear() {
    await this.#write((store) => store.clear(), null);
  }

  /** `changed(id)` is called when another tab wrote a conversation; null stands for all. */
  onChange(changed) {
    this.#channel?.addEventListener("message", (event) => changed(event.data));
  }

  #read() {
    return this.#database.transaction(STORE, "readonly").objectStore(STORE);
  }

  async #write(change, id) {
    if (!this.#database) return;
    const transaction = this.#database.transaction(STORE, "readwrite");
    change(transaction.objectStore(STORE));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
    this.#channel?.postMessage(id);
  }
}

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
