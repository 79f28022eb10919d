// Own what is computed of the figures before it is shown; where it is shown is others' business.

const USED = ["reserved", "filling", "ready", "quarantined", "scrubbing"];
const of = (counts, names) => names.reduce((sum, name) => sum + (counts[name] ?? 0), 0);

/** Blocks of a pool that hold something or may be written, those that may be evicted too. */
export const used = (counts) => of(counts, USED);
/** Blocks that a resize gave back or that are retired: memory that is not there to be used. */
export const gone = (counts) => of(counts, ["parked", "bad"]);
/** Blocks that there are to be used. */
export const room = (counts) => used(counts) + (counts.free ?? 0);

/** By how much a counter of caches has grown from one look to the next; what a deleted cache counted takes nothing away. */
export const grown = (caches, before, name) => growth(caches, before, name, () => 1);

/** Bytes of the blocks that a counter counts, from one look to the next; each cache has blocks of its own size. */
export const grownBytes = (caches, before, name) => growth(caches, before, name, (cache) => cache.bytes_per_copy);

/** By how much refusals have grown from one look to the next; those of a deleted cache's steps are told no more. */
export const grownRefusals = (refusals, before) => Math.max(0, numOf(refusals) - numOf(before));

const numOf = (refusals) => refusals.reduce((total, one) => total + one.count, 0);

function growth(caches, before, name, weight) {
  const were = new Map(before.map((one) => [one.cache, one.counters[name] ?? 0]));
  return caches.reduce((sum, one) => sum + Math.max(0, (one.counters[name] ?? 0) - (were.get(one.cache) ?? 0)) * weight(one), 0);
}

/** Say who grants nothing new, and how that ends; nothing where all grant. */
export function drained(sheet) {
  if (sheet.is_stopping) return "the daemon was told to stop: it grants nothing new, and ends with its leases";
  if (sheet.is_draining) return "the daemon is drained: no cache grants anything new until kvlease drain --undo";
  const names = sheet.caches.filter((one) => one.is_draining).map((one) => one.cache);
  if (!names.length) return "";
  const [first, ...others] = names;
  const which = others.length ? `the caches ${names.join(", ")} are drained, and grant` : `the cache ${first} is drained, and grants`;
  return `${which} nothing new until kvlease drain --cache NAME --undo`;
}

const words = new Intl.Collator("en", { numeric: true });
/** Compare two names for an order in which m2 comes before m10. */
export const byName = (one, other) => words.compare(one, other) || (one < other ? -1 : Number(one > other));
