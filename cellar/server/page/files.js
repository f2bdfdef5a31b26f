// Text files that go with a message.

const MOST_BYTES = 1_000_000;

/** A file's name and text. Raises Error, in words for the user. */
export async function readText(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 1 MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // Bytes that are no UTF-8, or a folder.
  }
  throw new Error(`${file.name} is not a text file.`);
}

/** A file within a message: its name, and its text in a fence that is longer than any in it. */
export function fenced({ name, text }) {
  const ticks = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1;
  const fence = "`".repeat(ticks);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Have files that are dropped anywhere, or pasted, given to `take`. */
export function onFiles(take) {
  const carries = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");
  const over = (event, is) => document.body.classList.toggle("dropping", is && carries(event));
  addEventListener("dragover", (event) => {
    over(event, true);
    if (carries(event)) event.preventDefault(); // else the browser would open it
  });
  addEventListener("dragleave", (event) => event.relatedTarget || over(event, false));
  addEventListener("drop", (event) => {
    over(event, false);
    if (!carries(event)) return;
    event.preventDefault();
    take([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    take(files);
  });
}
