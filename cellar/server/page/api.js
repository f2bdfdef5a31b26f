// What the page asks of the server. Addresses are relative to the page, so a proxy's prefix is kept.
import { events } from "./events.js";

const root = new URL("./", document.baseURI);

/** A refusal, in the server's words. `retryAfter` is in seconds. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export class Api {
  #keyring;

  constructor(keyring) {
    this.#keyring = keyring;
  }

  /** The engine at this moment. */
  async status(signal) {
    const answer = await fetch(new URL("engine/status", root), { signal, cache: "no-store" });
    if (!answer.ok) throw await refusal(answer);
    return answer.json();
  }

  /** True if the server takes this key. */
  async accepts(key) {
    const headers = { authorization: `Bearer ${key}` };
    return (await fetch(new URL("v1/models", root), { headers, cache: "no-store" })).status !== 401;
  }

  /** The pieces of an answer to `messages` or `prompt`: {thought}, {text}, {finish}, {usage}. Raises ApiError. */
  async *answer(body, signal) {
    const path = body.messages ? "v1/chat/completions" : "v1/completions";
    const response = await this.#post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new ApiError(500, piece.error.message);
      const choice = piece.choices[0];
      const thought = choice?.delta?.reasoning_content;
      if (thought) yield { thought };
      const text = choice?.delta?.content ?? choice?.text;
      if (text) yield { text };
      if (choice?.finish_reason) yield { finish: choice.finish_reason };
      if (piece.usage) yield { usage: piece.usage };
    }
  }

  /** One call with an answer in JSON. Nobody is asked for a key. Raises ApiError. */
  async call(method, path, body) {
    const key = this.#keyring.key;
    const headers = { ...(body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(new URL(path, root), { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
    if (!answer.ok) throw await refusal(answer);
    return answer.json();
  }

  async #post(path, body, signal) {
    for (;;) {
      const key = this.#keyring.key;
      const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
      const answer = await fetch(new URL(path, root), { method: "POST", headers, body: JSON.stringify(body), signal });
      if (answer.ok) return answer;
      if (answer.status !== 401 || !(await this.#keyring.ask(Boolean(key)))) throw await refusal(answer);
    }
  }
}

async function refusal(answer) {
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // A proxy between us spoke, and not in JSON.
  }
  return new ApiError(answer.status, message, Number(answer.headers.get("retry-after")) || null);
}
