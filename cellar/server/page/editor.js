// A question that is being edited, in its place. Escape leaves everything as it was.
import { sends } from "./composer.js";
import { el } from "./dom.js";

/** A form with `text`; `send(text)` or `cancel()` is called. Its field is to be given the focus once it stands in the page. */
export function editor(text, send, cancel) {
  const field = el("textarea", { class: "edit-field", "aria-label": "Edit your message", rows: "1" });
  field.value = text;
  const form = el("form", { class: "edit" }, field,
    el("div", { class: "edit-foot" },
      el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      el("button", { type: "submit", class: "solid" }, "Send")));
  const submit = () => {
    const fresh = field.value.trim();
    if (fresh === text) cancel();
    else if (fresh) send(fresh);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) {
      event.stopPropagation();
      cancel();
    } else if (event.target === field && sends(event)) {
      event.preventDefault();
      submit();
    }
  });
  return form;
}
