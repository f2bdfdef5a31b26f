// Looks at the engine once a second while the page is seen, and turns its counters into rates.
// Events: "status" (detail: the whole answer), "sample" (detail: a Sample), "lost" (the server does not answer).
//   Sample: { speed (tokens/s), running, waiting, memory, hits, queries (prompt tokens of the last minute) }

const PERIOD = 1000; // ms
const MINUTE = 60; // s

export class Engine extends EventTarget {
  #api;
  #timer = 0;
  #looking = false;
  #past = []; // answers of the last minute
  #wait = PERIOD;

  constructor(api) {
    super();
    this.#api = api;
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.#timer) : this.look()));
  }

  /** Look now, and then every second. */
  async look() {
    if (this.#looking) return;
    this.#looking = true;
    clearTimeout(this.#timer);
    try {
      const status = await this.#api.status(AbortSignal.timeout(5000));
      this.#wait = PERIOD;
      this.#tell("status", status);
      if (status.engine) this.#tell("sample", this.#sample(status));
      else this.#past = [];
    } catch {
      this.#past = [];
      this.#wait = Math.min(2 * this.#wait, 10 * PERIOD);
      this.#tell("lost", null);
    }
    this.#looking = false;
    if (!document.hidden) this.#timer = setTimeout(() => this.look(), this.#wait);
  }

  #sample({ time, engine }) {
    // A counter that fell below all that was seen belongs to an engine that was started again. One that fell a little
    // comes from another of several fronts, which saw an earlier step last.
    if (engine.generation_tokens < this.#past[0]?.engine.generation_tokens) this.#past = [];
    const before = this.#past.at(-1) ?? { time, engine };
    this.#past.push({ time, engine });
    while (time - this.#past[0].time > MINUTE) this.#past.shift();
    const oldest = this.#past[0].engine;
    const elapsed = time - before.time;
    return {
      speed: elapsed > 0 ? Math.max(engine.generation_tokens - before.engine.generation_tokens, 0) / elapsed : 0,
      running: engine.running,
      waiting: engine.waiting,
      memory: engine.memory,
      hits: Math.max(engine.prefix_hits - oldest.prefix_hits, 0),
      queries: Math.max(engine.prefix_queries - oldest.prefix_queries, 0),
      allHits: engine.prefix_hits,
      allQueries: engine.prefix_queries,
    };
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
