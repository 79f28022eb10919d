// Own the colours of states, tenants, tiers and caches; all are told apart by people who see red and green alike.

export const LOOKS = ["free", "reserved", "filling", "ready", "quarantined", "scrubbing", "bad", "parked", "held"];
export const WORDS = {
  free: "free", reserved: "being written", filling: "being filled", ready: "cached, idle", held: "cached, in use",
  quarantined: "quarantined", scrubbing: "being zeroed", bad: "retired", parked: "out of use",
};
export const ORDER = ["held", "reserved", "filling", "ready", "quarantined", "scrubbing", "bad", "parked", "free"];
/** What a block is that nobody has, and that no owner's colour would say. */
export const OWNERLESS = ["free", "scrubbing", "bad", "parked"];
export const TIERS = ["device", "host", "disk", "remote"];
/** Marks that say the same as the colour, for those who cannot rely on it. */
export const MARKS = { quarantined: "bar", bad: "cross" };

const STATES = {
  light: { free: "#e3e8ee", reserved: "#0072b2", filling: "#56b4e9", ready: "#8fd3bd", held: "#00795b",
    quarantined: "#e69f00", scrubbing: "#cc79a7", bad: "#c63f00", parked: "#8b95a1" },
  dark: { free: "#222c37", reserved: "#4aa8ea", filling: "#a5dbff", ready: "#2a6a5b", held: "#3ad0a4",
    quarantined: "#f5b731", scrubbing: "#dc93c0", bad: "#ff6a3a", parked: "#5a6472" },
};
const NAMED = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#b5a900", "#3f4a55", "#a6761d"],
  dark: ["#4aa8ea", "#f5b731", "#3ad0a4", "#dc93c0", "#a5dbff", "#ff7f45", "#b79be0", "#efe25a", "#b9c6d2", "#cf9f4c"],
};
const OTHERS = { light: "#9aa6b2", dark: "#6d7b88" };
const SOURCES = {
  light: { device: "#00795b", host: "#0072b2", disk: "#cc79a7", remote: "#e69f00", computed: "#cfd7df" },
  dark: { device: "#3ad0a4", host: "#4aa8ea", disk: "#dc93c0", remote: "#f5b731", computed: "#394653" },
};

const darkQuery = window.matchMedia("(prefers-color-scheme: dark)");
export const mode = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (darkQuery.matches ? "dark" : "light");
};
export const onModeChange = (act) => darkQuery.addEventListener("change", act);
export const ofState = (look) => STATES[mode()][look];
export const ofNumber = (number) => (number < 0 ? OTHERS[mode()] : NAMED[mode()][number % NAMED[mode()].length]);
export const ofSource = (name) => SOURCES[mode()][name];
export const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
export const soft = () => getComputedStyle(document.documentElement).getPropertyValue("--soft").trim();
export const line = () => getComputedStyle(document.documentElement).getPropertyValue("--line").trim();

/** The numbers by which names get their colours: a name keeps its own while it is there, whoever comes or goes. */
export class Numbers {
  #numbers = new Map();

  /** Give each new name the lowest number that is free, and take back those of names that are no more. */
  renew(names) {
    for (const name of this.#numbers.keys()) if (!names.includes(name)) this.#numbers.delete(name);
    const taken = new Set(this.#numbers.values());
    let lowest = 0;
    for (const name of names) {
      if (this.#numbers.has(name)) continue;
      while (taken.has(lowest)) lowest++;
      taken.add(lowest);
      this.#numbers.set(name, lowest);
    }
  }

  colour(name) {
    return ofNumber(this.#numbers.get(name) ?? -1);
  }
}

/** Return a colour mixed with the one of free blocks: `share` of it is left. */
export function faded(colour, share) {
  const ground = STATES[mode()].free;
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  const mixed = [1, 3, 5].map((at) => Math.round(part(colour, at) * share + part(ground, at) * (1 - share)));
  return `#${mixed.map((one) => one.toString(16).padStart(2, "0")).join("")}`;
}
