// Elements, made one by one: no text of a model ever passes through an HTML parser.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** el("button", { type: "button", onclick }, "Copy") */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A symbol of the sheet in index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** A button with an icon and a name; the name is seen unless `bare`. */
export function button(name, symbol, onclick, { bare = false, ...attributes } = {}) {
  const label = bare ? { "aria-label": name, title: name } : {};
  const content = bare ? [icon(symbol)] : [icon(symbol), el("span", {}, name)];
  return el("button", { type: "button", class: "tool", onclick, ...label, ...attributes }, ...content);
}

/** A copy button for the text that `read` gives. */
export function copyButton(read, options = {}) {
  const made = button("Copy", "copy", async () => {
    const copied = await copy(read());
    const use = made.querySelector("use");
    use.setAttribute("href", copied ? "#i-check" : "#i-close");
    say(copied ? "Copied" : "The browser did not allow copying");
    setTimeout(() => use.setAttribute("href", "#i-copy"), 1500);
  }, options);
  return made;
}

/** Tell a screen reader something short. */
export function say(text) {
  const status = byId("status");
  // A text that stays the same is not read again, so the field is emptied first.
  status.textContent = "";
  setTimeout(() => (status.textContent = text), 30);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https there is no clipboard API; the old way still works there.
    const field = el("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    const before = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}
