// The live view of the engine: everything in it is drawn from one sample a second.
import { byId } from "./dom.js";
import { count, percent, rate } from "./format.js";
import { Queue } from "./queue.js";
import { Rack } from "./rack.js";
import { Ring } from "./ring.js";
import { Spark, Trace } from "./trace.js";

export class Gauges {
  #trace = new Trace(byId("trace"));
  #spark = new Spark(byId("spark"));
  #queue = new Queue(byId("queue"));
  #ring = new Ring(byId("ring"));
  #racks = new Map();

  constructor(engine) {
    engine.addEventListener("status", ({ detail }) => this.#head(detail));
    engine.addEventListener("sample", ({ detail }) => this.#draw(detail));
    engine.addEventListener("lost", () => this.#lamp("down", "The server does not answer"));
  }

  #head({ engine, model }) {
    if (engine) this.#lamp(engine.running ? "busy" : "up", model.name);
    else this.#lamp("down", "The engine is being started again");
  }

  #lamp(kind, text) {
    byId("lamp").className = `lamp ${kind}`;
    byId("model").textContent = text;
    if (kind === "down") byId("spark-text").textContent = "Down";
  }

  #draw({ speed, running, waiting, memory, hits, queries, allHits, allQueries }) {
    const peak = this.#trace.push(speed);
    byId("peak").textContent = peak ? `peak ${rate(peak)}` : "";
    this.#spark.push(speed);
    this.#queue.draw(running, waiting);
    byId("speed").textContent = rate(speed);
    byId("spark-text").textContent = running || speed ? `${rate(speed)} tokens/s` : "Idle";
    byId("running").textContent = count(running);
    byId("waiting").textContent = count(waiting);
    for (const tier of memory) this.#rack(tier.tier).draw(tier);
    // The last minute if it brought prompts, else all since the start.
    const [found, looked] = queries ? [hits, queries] : [allHits, allQueries];
    if (!looked) return;
    this.#ring.draw(found / looked);
    byId("hit-rate").textContent = percent(found / looked);
    byId("hits").textContent = `${count(found)} of ${count(looked)} ${queries ? "in a minute" : "since the start"}`;
  }

  #rack(tier) {
    if (!this.#racks.has(tier)) {
      const rack = new Rack(tier);
      this.#racks.set(tier, rack);
      byId("tiers").append(rack.place);
    }
    return this.#racks.get(tier);
  }
}
