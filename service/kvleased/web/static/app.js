// Own the page: takes what the stream brings and hands it to the map, the timelines and the tables.

import { POINTS_MAX, Timeline, spark } from "/ui/charts.js";
import * as colours from "/ui/colours.js";
import { keep, recall } from "/ui/keeping.js";
import { Stream, setToken, takeToken } from "/ui/live.js";
import { BlockMap } from "/ui/map.js";
import { age, badge, bytes, count, el, meter, percent, rate, table, text } from "/ui/panels.js";
import { byName, drained, gone, grown, grownBytes, grownRefusals, room, used } from "/ui/sums.js";

const SOURCES = ["device", "host", "disk", "remote", "computed"];
const USES = ["held", "reserved", "filling", "quarantined", "scrubbing", "ready"];
const WAYS = [
  ["device → host", "offloads", "device"], ["host → device", "reloads", "host"],
  ["host → disk", "disk_stores", "host"], ["disk → device", "disk_loads", "disk"],
  ["host → remote", "remote_stores", "host"], ["remote → device", "remote_loads", "remote"],
];
const GAP_SECONDS = 3;
const REFUSALS_SHOWN = 12;
const TENANTS_NAMED = 24;
const PHASES_ODD = new Set(["quarantined"]);
const narrow = matchMedia("(max-width: 640px)");
const THEMES = ["auto", "light", "dark"];
const $ = (id) => document.getElementById(id);

const POINT = $("map-help").textContent;
const map = new BlockMap();
const usage = new Timeline($("usage"), USES, colours.ofState);
const hits = new Timeline($("hits"), SOURCES, colours.ofSource);
const moved = new Map();
let before = null;
let newest = null;
let newestAt = 0;
let chosen = new URLSearchParams(location.search).get("cache") ?? "";
let astray = "";
let isPaused = false;

// What the stream brings

const stream = new Stream((kind, value) => {
  if (kind === "state") state(value.state, value.why);
  else if (kind === "map") { map.take(value); if (map.by !== "state") legend(); }
  else if (kind === "figures") figures(value);
});

/** Say when something was, with the day unless that is today. */
function when(milliseconds) {
  const then = new Date(milliseconds);
  return then.toDateString() === new Date().toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
}

function state(name, why = "") {
  $("status").dataset.state = name;
  const shown = document.querySelector("main").classList;
  // What is shown stays old until new figures have come.
  if (name === "live") shown.remove("old");
  else if (newest && ["lost", "refused"].includes(name)) shown.add("old");
  text($("status-text"), { live: "live", paused: "paused", connecting: "connecting", lost: "connection lost, trying again", refused: "not allowed" }[name]);
  const old = shown.contains("old") ? ` What is shown is old: it is of ${when(newestAt)}.` : "";
  text($("notice"), why ? `${why[0].toUpperCase()}${why.slice(1).replace(/\.$/, "")}.${old}` : "");
  $("notice").hidden = !(why && ["live", "lost", "refused"].includes(name));
  $("token-form").hidden = name !== "refused";
  if (name === "refused") $("token").focus();
}

function figures(sheet) {
  sheet.caches.sort((one, other) => byName(one.cache, other.cache));
  choices(sheet.caches);
  state("live", [astray && `there is no cache ${astray}, so all caches are shown`, drained(sheet)].filter(Boolean).join("; "));
  if (before && before.epoch !== sheet.epoch) anew();
  newest = sheet;
  newestAt = Date.now();
  const caches = sheet.caches.filter((one) => !chosen || one.cache === chosen);
  const seconds = before ? sheet.seconds - before.seconds : 0;
  map.figures(sheet.caches, chosen);
  const numPools = caches.reduce((sum, one) => sum + Object.keys(one.pools).length, 0);
  text($("map-cut"), `Here are ${count(sheet.pools_max)} of ${count(numPools)} pools; choose a cache to see its own.`);
  $("map-cut").hidden = numPools <= sheet.pools_max;
  text($("map-help"), numPools ? POINT : "There is no cache. Programs register them; their blocks will be shown here.");
  if (!before || seconds > 0.2) {
    const now = summed(caches);
    if (seconds > GAP_SECONDS) unseen(before);
    lines(sheet, caches, now);
    tiles(sheet, caches, now, seconds);
    flows(caches, now, seconds);
    before = sheet;
  }
  legend();
  tables(sheet, caches);
  text($("foot"), `Daemon life ${sheet.epoch}. Timelines begin when the page is opened; nothing is computed while nobody looks.`);
}

/** Forget what was seen: what comes next is of other caches, or of another life of the daemon. */
function anew() {
  before = null;
  usage.clear();
  hits.clear();
  moved.clear();
}

/** Sum what several caches have and did. */
function summed(caches) {
  const found = { device: Object.fromEntries(colours.LOOKS.map((look) => [look, 0])), counters: {}, total: 0 };
  for (const cache of caches) {
    const device = cache.pools.device;
    for (const look of colours.LOOKS) found.device[look] += (look === "held" ? device.ready_held : look === "ready" ? device.ready - device.ready_held : device[look]);
    for (const [name, value] of Object.entries(cache.counters)) found.counters[name] = (found.counters[name] ?? 0) + value;
  }
  found.total = caches.reduce((sum, one) => sum + room(one.pools.device), 0);
  return found;
}

// Timelines and tiles

/** Leave a hole in the timelines where nobody looked, or nothing came: what was there is not known. */
function unseen(sheet) {
  for (const timeline of [usage, hits]) timeline.push(sheet.seconds, null);
}

function lines(sheet, caches, now) {
  usage.push(sheet.seconds, now.total ? Object.fromEntries(USES.map((look) => [look, now.device[look] / now.total])) : null);
  const tokens = Object.fromEntries(SOURCES.map((name) => [name, before ? grown(caches, before.caches, `prefix_tokens_${name}`) : 0]));
  const sum = Object.values(tokens).reduce((total, one) => total + one, 0);
  hits.push(sheet.seconds, sum ? Object.fromEntries(SOURCES.map((name) => [name, tokens[name] / sum])) : null);
}

const hitShare = (shares) => 1 - (shares.computed ?? 0);
usage.onPoint = (point, last) => {
  if (!point) return;
  const idle = point.shares.ready;
  const busy = USES.reduce((sum, look) => sum + point.shares[look], 0) - idle;
  $("usage-now").replaceChildren(...ago(point, last), el("b", {}, percent(busy)), " in use, ", el("b", {}, percent(idle)), " cached and idle");
};
hits.onPoint = (point, last) => {
  if (!point) { text($("hits-now"), "no prompt seen yet"); return; }
  $("hits-now").replaceChildren(...ago(point, last), el("b", {}, percent(hitShare(point.shares))), " of tokens found");
};
const ago = (point, last) => (last - point.seconds > 2 ? [`${age(last - point.seconds)} ago: `] : []);

/** The refusals of the chosen cache, or all: some came before any cache was asked. */
const refusals = (sheet) => sheet.refusals.filter((one) => !chosen || one.cache === chosen);
const numRefused = (sheet) => refusals(sheet).reduce((total, one) => total + one.count, 0);

function tiles(sheet, caches, now, seconds) {
  const sum = (name) => caches.reduce((total, one) => total + one[name], 0);
  const busy = now.total - now.device.free - now.device.ready;
  const tokens = SOURCES.map((name) => now.counters[`prefix_tokens_${name}`] ?? 0);
  const all = tokens.reduce((total, one) => total + one, 0);
  const inPools = (look) => caches.reduce((total, one) => total + Object.values(one.pools).reduce((found, pool) => found + pool[look], 0), 0);
  const missing = [["parked", "given back"], ["bad", "retired"], ["quarantined", "quarantined"]].map(([look, words]) => [inPools(look), words]);
  const isOdd = missing[1][0] + missing[2][0] > 0;
  const refused = numRefused(sheet);
  const refusedNow = before ? grownRefusals(refusals(sheet), refusals(before)) : 0;
  const perSecond = (number) => (seconds ? rate(number / seconds) : "–");
  const size = caches.reduce((total, one) => total + (one.usable_blocks - gone(one.pools.device)) * one.bytes_per_block, 0);
  // What one engine took as a whole is no pool that runs full: only that engine knows which of its blocks are in use.
  const areOwn = caches.length > 0 && caches.every((one) => one.magazines.some((magazine) => magazine.private + magazine.findable >= room(one.pools.device)));
  const cells = [
    ["In use", percent(now.total ? busy / now.total : NaN), `of ${count(now.total)} blocks, ${bytes(size)}${areOwn ? ", all of them an engine's own" : ""}`, busy / now.total > 0.95 && !areOwn],
    ["Free or evictable", count(now.device.free + now.device.ready), `${count(now.device.free)} of them free`, false],
    ["Prompt found", percent(all ? 1 - tokens.at(-1) / all : NaN), `of ${count(all)} tokens`, false],
    ["Leases", count(sum("num_leases")), `workers ${count(sum("num_workers"))}, pins ${count(sum("num_pins"))}`, false],
    ["Waiting calls", count(sum("num_waiting")), sum("num_copies") ? `${count(sum("num_copies"))} ${sum("num_copies") === 1 ? "copy" : "copies"} under way` : "no copy under way", sum("num_waiting") > 0],
    ["Evictions/s", perSecond(before ? grown(caches, before.caches, "evictions") : 0), `${count(now.counters.evictions ?? 0)} since start`, false],
    ["Refusals/s", perSecond(refusedNow), `${count(refused)} since start`, refusedNow > 0],
    ["Out of use", count(missing.reduce((total, [number]) => total + number, 0)), missing.filter(([number]) => number).map(([number, words]) => `${count(number)} ${words}`).join(", ") || "no block quarantined", isOdd],
  ];
  const list = $("tiles");
  while (list.children.length < cells.length) {
    list.append(el("div", { class: "tile" }, el("dt"), el("dd", { class: "value" }), el("dd", { class: "more" })));
  }
  cells.forEach(([name, value, more, isWarning], at) => {
    const tile = list.children[at];
    [name, value, more].forEach((words, place) => text(tile.children[place], words));
    tile.dataset.tone = isWarning ? "warn" : "";
  });
}

function flows(caches, now, seconds) {
  const room = $("flows");
  const shown = WAYS.filter(([, counter]) => now.counters[counter]);
  if (room.dataset.shown !== shown.map(([way]) => way).join() || !room.children.length) {
    room.dataset.shown = shown.map(([way]) => way).join();
    room.replaceChildren(...(shown.length ? shown.map(([way]) => el("div", { class: "flow" }, el("span", { class: "way" }, way), el("span", { class: "rate" }), el("span", { class: "sum" }), el("canvas", { "aria-hidden": "true" })))
      : [el("p", { class: "empty" }, "No block has moved between tiers yet.")]));
  }
  shown.forEach(([way, counter, source], at) => {
    const values = moved.get(way) ?? [];
    const blocks = before && seconds ? grown(caches, before.caches, counter) / seconds : 0;
    values.push(blocks);
    if (values.length > POINTS_MAX) values.shift();
    moved.set(way, values);
    const flow = room.children[at];
    text(flow.children[1], `${rate(blocks)} blocks/s`);
    const moving = before && seconds ? grownBytes(caches, before.caches, counter) / seconds : 0;
    text(flow.children[2], `${bytes(moving)}/s, ${count(now.counters[counter])} blocks since start`);
    spark(flow.children[3], values, colours.ofSource(source));
  });
}

// The legend

function item(colour, words, number, mark) {
  const swatch = el("span", { class: "swatch", ...(mark ? { "data-mark": mark } : {}) });
  swatch.style.background = colour;
  const made = el("li", {}, swatch, words);
  if (number !== null) made.append(el("b", {}, count(number)));
  if (number === 0) made.dataset.none = "";
  return made;
}

function legend() {
  if (!newest) return;
  const caches = newest.caches.filter((one) => !chosen || one.cache === chosen);
  const fade = item(colours.faded(colours.soft().startsWith("#") ? colours.soft() : "#808080", 0.5), "paler: cached and idle", null);
  const numOf = (look) => caches.reduce((sum, one) => sum + Object.values(one.pools).reduce((total, pool) => total + (look === "held" ? pool.ready_held : look === "ready" ? pool.ready - pool.ready_held : pool[look]), 0), 0);
  const ownerless = colours.OWNERLESS.filter((look) => look === "free" || numOf(look)).map((look) => item(colours.ofState(look), colours.WORDS[look], null, colours.MARKS[look]));
  const parts = {
    state: () => colours.ORDER.map((look) => item(colours.ofState(look), colours.WORDS[look], numOf(look), colours.MARKS[look])),
    tenant: () => {
      const named = [...map.pools.values()][0]?.tenants ?? [];
      const blocksOf = (name) => caches.reduce((sum, one) => sum + (one.tenants.find((tenant) => tenant.tenant === name)?.used ?? 0), 0);
      const usedBy = (name) => (caches.some(isCut) ? null : blocksOf(name));
      const most = named.map((name, at) => ({ name, at, used: blocksOf(name) })).sort((one, other) => other.used - one.used).slice(0, TENANTS_NAMED);
      const left = named.length - most.length;
      return [...most.sort((one, other) => one.at - other.at).map(({ name, at }) => item(map.tenants.colour(name), name, usedBy(name))),
        ...(left ? [el("li", {}, `and ${count(left)} more ${left === 1 ? "tenant" : "tenants"}`)] : []), item(colours.ofNumber(-1), "others", usedBy("(others)")), fade, ...ownerless];
    },
    tier: () => [...colours.TIERS.slice(0, 3).filter((tier) => caches.some((one) => tier in one.pools)).map((tier) => item(colours.ofSource(tier), tier, caches.reduce((sum, one) => sum + (one.pools[tier] ? used(one.pools[tier]) : 0), 0))), fade, ...ownerless],
    cache: () => [...caches.map((one) => item(map.caches.colour(one.cache), one.cache, null)), fade, ...ownerless],
  };
  const made = parts[map.by]();
  if ($("legend").textContent !== made.map((one) => one.textContent).join("") || $("legend").dataset.by !== map.by + colours.mode()) {
    $("legend").replaceChildren(...made);
    $("legend").dataset.by = map.by + colours.mode();
  }
}

function seriesLegends() {
  $("usage-legend").replaceChildren(...USES.map((look) => item(colours.ofState(look), colours.WORDS[look], null, colours.MARKS[look])));
  const words = { device: "device hit", host: "host hit", disk: "disk hit", remote: "remote hit", computed: "computed" };
  $("hits-legend").replaceChildren(...SOURCES.map((name) => item(colours.ofSource(name), words[name], null)));
}

// Tables

function tables(sheet, caches) {
  const isMany = caches.length > 1;
  const named = (one, words) => (isMany ? `${one.cache} · ${words}` : words);
  leases(caches, named);
  const most = caches.some(isCut) ? ", those with the most" : "";
  table($("tenants"), `Device blocks by tenant${most}`, [["Tenant"], ["Used", true], ["Held", true], ["Pinned", true]],
    caches.flatMap((one) => one.tenants.map((tenant) => [named(one, tenant.tenant), count(tenant.used), count(tenant.held), count(tenant.pinned)])),
    "No tenant has a block.");
  table($("magazines"), "Magazines: what engines hold by block id", [["Magazine"], ["Private", true], ["Findable", true]],
    caches.flatMap((one) => one.magazines.map((magazine) => [named(one, `number ${magazine.magazine_id}`), count(magazine.private), count(magazine.findable)])),
    "No engine has a magazine.");
  table($("waiting"), "Calls that wait", [["Call"], ["For"], ["Priority"], ["Needs", true], ["There are", true], ["Since", true]],
    caches.flatMap((one) => one.waiting.map((call) => [named(one, call.verb), call.reason, call.priority, count(call.num_blocks), count(call.available_blocks), age(call.age_seconds)])),
    "No call waits.");
  const refused = refusals(sheet);
  const cut = refused.length > REFUSALS_SHOWN ? `, the ${REFUSALS_SHOWN} most frequent of ${refused.length} kinds` : "";
  table($("refusals"), `Refusals since the start${cut}`, [["Verb"], ["Code"], ["Reason"], ["Times", true], ["What to do"]],
    refused.slice(0, REFUSALS_SHOWN).map((one) => [one.cache ? named(one, one.verb) : one.verb, one.code, one.reason, count(one.count), one.why]),
    "Nothing was refused.");
  movers(sheet, caches);
  ghosts(caches);
  sums(sheet, caches);
}

/** Tell whether a cache has more tenants with blocks than the daemon lists. */
const isCut = (one) => one.num_tenants > one.tenants.length;

/** Say beside the titles what is below them, for who has folded that. */
function sums(sheet, caches) {
  const tenants = new Set(caches.flatMap((one) => one.tenants.map((tenant) => tenant.tenant)));
  const off = caches.flatMap((one) => one.tiers.filter((tier) => ["off", "degraded"].includes(tier.status)).map((tier) => `${tier.tier} is ${tier.status}`));
  const refused = numRefused(sheet);
  const waiting = caches.reduce((total, one) => total + one.num_waiting, 0);
  const more = caches.some(isCut) ? "at least " : "";
  text($("tenants-now"), tenants.size === 1 ? "1 tenant has blocks" : `${more}${count(tenants.size)} tenants have blocks`);
  text($("tiers-now"), [...new Set(off)].join(", "));
  text($("refusals-now"), `${count(refused)} refused, ${count(waiting)} waiting`);
}

function leases(caches, named) {
  const seconds = ([, lease]) => lease.age_seconds ?? Number.MAX_VALUE;
  const all = caches.flatMap((one) => one.leases.map((lease) => [one, lease])).sort((one, other) => seconds(other) - seconds(one));
  const total = caches.reduce((sum, one) => sum + one.num_leases, 0);
  text($("leases-now"), total > all.length ? `the ${count(all.length)} oldest of ${count(total)}` : total ? `${count(total)}, the oldest first` : "");
  table($("leases"), "", [["Lease"], ["Tenant"], ["Phase"], ["Blocks", true], ["Tokens", true], ["Age", true], ["Expires in", true]],
    all.map(([one, lease]) => [named(one, lease.lease_id), lease.tenant, badge(lease.phase, PHASES_ODD.has(lease.phase)), count(lease.num_blocks), count(lease.num_tokens),
      lease.age_seconds === null ? "earlier life" : age(lease.age_seconds), age(lease.seconds_left)]),
    "There is no lease.");
}

function movers(sheet, caches) {
  const rows = Object.entries(sheet.movers).map(([name, one]) => [`${name} mover`, "", count(one.num_waiting), count(one.num_sent), one.oldest_seconds ? age(one.oldest_seconds) : "–"]);
  const tiers = caches.flatMap((cache) => cache.tiers.map((one) => {
    const pool = cache.pools[one.tier];
    const words = el("span", {}, badge(one.status, one.status !== "ready"), ...(one.reason ? [` ${one.reason}`] : []), ...(pool && room(pool) ? [" ", meter(used(pool) / room(pool)), percent(used(pool) / room(pool))] : []));
    return [`${caches.length > 1 ? `${cache.cache} · ` : ""}${one.tier}`, words, "", "", ""];
  }));
  table($("movers"), "Lower tiers, and batches of copies that are not done", [["Name"], ["State"], ["Waiting", true], ["Under way", true], ["Oldest", true]], [...tiers, ...rows], "");
}

function ghosts(caches) {
  const parts = caches.filter((one) => one.ghosts.length).map((cache) => {
    const counters = cache.counters;
    const tokens = SOURCES.map((name) => counters[`prefix_tokens_${name}`] ?? 0);
    const all = tokens.reduce((sum, one) => sum + one, 0);
    const own = all ? (counters.prefix_tokens_device ?? 0) / all : NaN;
    const shares = cache.ghosts.filter((one) => one.keys).map((one) => ({ name: one.name, share: one.hits / one.keys }));
    const best = shares.reduce((found, one) => (!found || one.share > found.share ? one : found), null);
    const same = shares.find((one) => one.name === `${cache.policy}@${cache.usable_blocks}`);
    const base = same ? same.share : own;
    const gain = best ? best.share - base : 0;
    const line = (name, share, isOwn) => {
      const bar = el("i");
      bar.style.width = `${Math.max(0, Math.min(100, share * 100))}%`;
      return el("div", { class: isOwn ? "line own" : "line" }, el("span", {}, name), el("span", { class: "track", "aria-hidden": "true" }, bar), el("span", { class: "value" }, percent(share)));
    };
    const words = !best ? "The ghosts have seen no request yet."
      : gain > 0.01 ? `${best.name} would find ${Math.round(gain * 100)} points more than ${same ? "the policy in use" : "the device pool does"}.`
        : "No ghost would find more than the policy in use: neither another policy nor more blocks would help much.";
    return el("div", { class: "ghost" }, el("h3", { class: "unseen" }, cache.cache),
      line(`${caches.length > 1 ? `${cache.cache}: ` : ""}device pool, as it is`, own, true),
      ...shares.map((one) => line(one.name, one.share, false)), el("p", { class: "advice" }, words));
  });
  $("ghosts-help").hidden = !parts.length;
  $("ghosts").replaceChildren(...(parts.length ? parts : [el("p", { class: "empty" }, "No cache has ghosts. Register one with ghosts, such as ", el("code", {}, 'ghosts=("lru", "adaptive@20000")'), ", to see what another policy or size would find.")]));
}

// Controls

function choices(caches) {
  const names = ["", ...caches.map((one) => one.cache)];
  const select = $("cache");
  if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name || "all")));
  }
  if (chosen && !names.includes(chosen)) {
    astray = chosen;
    chosen = "";
    anew();
    stream.start(chosen);
  }
  select.value = chosen;
}

function go() {
  if (isPaused || document.hidden) stream.stop();
  else { state("connecting"); stream.start(chosen); }
  if (isPaused) state("paused");
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  text($("theme"), `Theme: ${name}`);
  repaint();
}

/** On a narrow screen the lists are folded, each with its sum beside its title. */
function fold() {
  for (const one of document.querySelectorAll("details.fold")) one.open = !narrow.matches;
}

function repaint() {
  seriesLegends();
  legend();
  map.draw();
  usage.draw();
  hits.draw();
}

$("cache").addEventListener("change", (event) => {
  chosen = event.target.value;
  astray = "";
  const query = chosen ? `?cache=${encodeURIComponent(chosen)}` : "";
  history.replaceState(null, "", location.pathname + query);
  anew();
  go();
});
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  text($("pause"), isPaused ? "Go on" : "Pause");
  // What is shown would go on to be that of the cache before.
  $("cache").disabled = isPaused;
  go();
});
$("theme").addEventListener("click", () => {
  const now = recall("localStorage", "kvlease-theme") ?? "auto";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  keep("localStorage", "kvlease-theme", next);
  theme(next);
});
$("colour-by").addEventListener("change", (event) => {
  map.by = event.target.value;
  repaint();
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken($("token").value);
  $("token").value = "";
  go();
});
$("skip").addEventListener("click", (event) => {
  const first = document.querySelector("canvas.map");
  if (!first) return;
  // The map itself takes the arrow keys, its card does not.
  event.preventDefault();
  first.focus();
});
document.addEventListener("visibilitychange", go);
// An address that differs only behind the # is not loaded anew.
addEventListener("hashchange", () => { if (takeToken()) go(); });
colours.onModeChange(repaint);
narrow.addEventListener("change", fold);

takeToken();
fold();
theme(recall("localStorage", "kvlease-theme") ?? "auto");
go();
