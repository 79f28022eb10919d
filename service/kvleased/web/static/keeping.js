// Own what the page keeps in the browser; where the browser keeps nothing, it lasts as long as the page.

const own = new Map();

/** Keep words under a name, in "localStorage" or, until the tab is closed, in "sessionStorage". */
export function keep(storage, name, words) {
  own.set(name, words);
  try {
    window[storage].setItem(name, words);
  } catch {
    // A browser that blocks the data of sites refuses even to be asked.
  }
}

/** Return what is kept under a name, or null. */
export function recall(storage, name) {
  if (own.has(name)) return own.get(name);
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}
