// Small things that outlive the page, in a storage that the browser may forbid: then they live as long as the page.

/** The text kept under a name, or null. */
export function read(name, storage = "localStorage") {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text; null forgets it. */
export function write(name, text, storage = "localStorage") {
  try {
    if (text === null) window[storage].removeItem(name);
    else window[storage].setItem(name, text);
  } catch {
    // Full or forbidden.
  }
}
