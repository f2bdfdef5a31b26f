// Conversations as the server keeps them (/v1/conversations): what this page writes, other browsers find, and the other
// way round. The browser's own copy has more (what an answer cost, its seed), so it stays the one that is worked with.

import { said } from "./conversation.js";

export class Archive {
  #api;
  #queue = Promise.resolve(); // one change after the other
  #ready = false; // the server has answered, so it keeps what it is given

  constructor(api) {
    this.#api = api;
  }

  /** What is there: [{ id, local, title, created, updated }], the last active first; null if the server cannot be
      asked. `local` is the id in the browser that began it. */
  async list() {
    const found = [];
    try {
      for (let after = ""; ; ) {
        const page = await this.#api.call("GET", `v1/conversations?limit=100${after && `&after=${after}`}`);
        for (const { id, metadata, created_at: created, updated_at: updated } of page.data)
          found.push({ id, local: metadata?.local, title: metadata?.title ?? "", created: created * 1000, updated: updated * 1000 });
        this.#ready = true;
        if (!page.has_more) return found;
        after = page.last_id;
      }
    } catch {
      return null;
    }
  }

  /** The ids of those that say all words of a query, as the server knows them; null if it cannot be asked. */
  async search(query) {
    const found = new Set();
    try {
      for (let after = ""; ; ) {
        const page = await this.#api.call("GET", `v1/conversations?limit=100&query=${encodeURIComponent(query)}${after && `&after=${after}`}`);
        for (const { id } of page.data) found.add(id);
        if (!page.has_more) return found;
        after = page.last_id;
      }
    } catch {
      return null;
    }
  }

  /** The turns of one, with the ids of their items. */
  async turns(id) {
    const turns = [];
    for (let after = ""; ; ) {
      const page = await this.#api.call("GET", `v1/conversations/${id}/items?order=asc&limit=100${after && `&after=${after}`}`);
      for (const item of page.data) {
        if (item.type !== "message" || !["user", "assistant"].includes(item.role)) continue;
        const text = item.content.map((part) => part.text ?? "").join("\n");
        turns.push({ role: item.role, text, item: item.id, kept: text, ...(item.role === "assistant" ? { finish: "stop" } : {}) });
      }
      if (!page.has_more) return turns;
      after = page.last_id;
    }
  }

  /** Have the server know of a conversation that it does not know yet; the page goes on without it if it refuses. */
  begin(conversation) {
    return this.#next(() => this.#begun(conversation)); // behind what keeps its last turn: it begins once
  }

  async #begun(conversation) {
    if (conversation.server || !(this.#ready || (await this.list()))) return;
    try {
      const made = await this.#api.call("POST", "v1/conversations", { metadata: named(conversation) });
      conversation.server = made.id;
      conversation.items = [];
      delete conversation.lost;
    } catch {
      // It stays in this browser.
    }
  }

  /** Bring the server's items to what the conversation holds by now. Only its end can have changed. */
  keep(conversation) {
    return this.#next(async () => {
      try {
        await this.#begun(conversation);
        await this.#bring(conversation);
      } catch (error) {
        if (error.status !== 404) throw error;
        unkept(conversation); // it was deleted there, or is too old: it begins anew
        await this.#begun(conversation);
        await this.#bring(conversation);
      }
    });
  }

  async #bring(conversation) {
    if (!conversation.server) return;
    const path = `v1/conversations/${conversation.server}`;
    const turns = conversation.turns.filter((turn) => said(turn) && (turn.role === "user" || turn.finish));
    // A turn that was leafed away while it was being stored has the id of an item that is gone.
    const held = new Set(conversation.items);
    const first = turns.findIndex((turn) => !held.has(turn.item) || turn.kept !== said(turn));
    const fresh = first < 0 ? [] : turns.slice(first);
    const there = new Set(turns.filter((turn) => !fresh.includes(turn)).map((turn) => turn.item));
    const drop = (id) => this.#api.call("DELETE", `${path}/items/${id}`).then(() => true, (error) => error.status !== 404);
    // The page was closed before it knew the ids of its last change: whatever else is there goes, too.
    let known = Boolean(conversation.items);
    for (const id of conversation.items ?? []) if (!there.has(id)) known = (await drop(id)) && known;
    if (!known) for (const { item } of await this.turns(conversation.server)) if (!there.has(item)) await drop(item);
    for (let k = 0; k < fresh.length; k += 20) {
      const part = fresh.slice(k, k + 20);
      const made = await this.#api.call("POST", `${path}/items`, { items: part.map(itemOf) });
      part.forEach((turn, j) => Object.assign(turn, { item: made.data[j].id, kept: said(turn) }));
    }
    conversation.items = turns.map((turn) => turn.item);
  }

  rename(conversation) {
    return this.#next(async () => {
      if (conversation.server) await this.#api.call("POST", `v1/conversations/${conversation.server}`, { metadata: named(conversation) });
    });
  }

  /** Delete it there, with what the engine remembers of it. Raises if the server does not. */
  async remove(conversation) {
    if (!conversation.server) return;
    await this.#queue;
    try {
      await this.#api.call("DELETE", `v1/conversations/${conversation.server}`);
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }

  /** Where the memory of conversations lies: name -> { device: tokens, host: ... }. */
  async memory(names) {
    const found = new Map();
    for (let k = 0; k < names.length; k += 100) {
      const asked = names.slice(k, k + 100).map((name) => `conversation=${encodeURIComponent(name)}`).join("&");
      try {
        for (const { conversation, tokens } of (await this.#api.call("GET", `engine/memory?${asked}`)).data) found.set(conversation, tokens);
      } catch {
        return found;
      }
    }
    return found;
  }

  #next(change) {
    this.#queue = this.#queue.then(change).catch(() => {}); // the next change finds what is missing
    return this.#queue;
  }
}

/** The server has none of it any more. */
export function unkept(conversation) {
  for (const turn of conversation.turns) delete turn.item;
  delete conversation.server;
  delete conversation.items;
  conversation.lost = true;
}

/** `local`: a page that was closed before it knew the server's id finds its conversation by it. */
function named({ title, id }) {
  return { title, local: id };
}

function itemOf(turn) {
  const { role } = turn;
  return { type: "message", role, content: [{ type: role === "user" ? "input_text" : "output_text", text: said(turn) }] };
}
