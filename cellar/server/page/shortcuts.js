// Keys for what is done often, and the sheet that lists them.
import { byId, el } from "./dom.js";

const MOD = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

const LIST = [
  { keys: ["Enter"], does: "Send the message" },
  { keys: ["Shift", "Enter"], does: "Begin a new line" },
  { keys: ["Esc"], does: "Stop the answer, or close what is open" },
  { keys: ["↑"], does: "Edit the last message, from an empty field" },
  { keys: [MOD, "Shift", "O"], does: "New conversation", name: "begin", fits: (event) => event.shiftKey && event.key.toLowerCase() === "o" },
  { keys: [MOD, "K"], does: "Search conversations", name: "search", fits: (event) => !event.shiftKey && event.key.toLowerCase() === "k" },
  { keys: [MOD, "/"], does: "Show these keys", name: "list", fits: (event) => event.key === "/" },
];

export class Shortcuts {
  #sheet = byId("shortcuts");

  /** `actions`: { begin(), search(), editLast() }. */
  constructor(actions) {
    const all = { ...actions, list: () => this.#sheet.showModal() };
    byId("shortcuts-list").append(...LIST.flatMap(({ keys, does }) => [el("dt", {}, ...keys.flatMap((key) => [el("kbd", {}, key), " "])), el("dd", {}, does)]));
    byId("shortcuts-open").addEventListener("click", () => {
      byId("settings").close();
      all.list();
    });
    this.#sheet.addEventListener("click", (event) => event.target === this.#sheet && this.#sheet.close());
    document.addEventListener("keydown", (event) => {
      if (event.isComposing || event.altKey || !(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]")) return;
      const found = LIST.find(({ fits }) => fits?.(event));
      if (!found) return;
      event.preventDefault();
      all[found.name]();
    });
    byId("ask").addEventListener("keydown", (event) => {
      if (event.key !== "ArrowUp" || event.target.value || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions.editLast();
    });
  }
}
