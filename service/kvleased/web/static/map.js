// Own the block map: one canvas for each pool, what is under the pointer or the cursor, and what it is called.

import * as colours from "/ui/colours.js";
import { ask, bytesOf } from "/ui/live.js";
import { age, count, el, percent } from "/ui/panels.js";
import { byName, gone, room, used } from "/ui/sums.js";

const FLASH_MS = 900;
const FLASHED_MAX = 3000;
const CELL_MIN = 3;
const CELL_MAX = 17;
const ASK_AFTER_MS = 90;
const NOBODY = 0;
const OTHERS = 255;
const still = window.matchMedia("(prefers-reduced-motion: reduce)");

const nameOf = (owner, tenants) => (owner === NOBODY || owner === OTHERS ? owner : tenants[owner - 1]);

/** Make these the children of an element; those that stay are not moved, as what is moved loses the keyboard. */
function settle(room, children) {
  for (const one of [...room.children]) if (!children.includes(one)) one.remove();
  children.forEach((one, at) => { if (room.children[at] !== one) room.insertBefore(one, room.children[at] ?? null); });
}

/** One pool: its cells, and the canvas that shows them. */
class PoolMap {
  constructor(owner, sheet) {
    this.owner = owner;
    this.cache = sheet.cache;
    this.tier = sheet.tier;
    this.canvas = el("canvas", { class: "map", tabindex: "0", role: "application", "aria-roledescription": "block map",
      "aria-describedby": "map-help" });
    this.what = el("span", { class: "what" });
    this.how = el("span", { class: "how" });
    this.share = el("div", { class: "share", "aria-hidden": "true" });
    this.figure = el("figure", { class: "pool" }, el("figcaption", {}, this.what, this.how), this.share, this.canvas);
    this.cursor = -1;
    this.flashes = new Map();
    this.frame = 0;
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch" && document.activeElement !== this.canvas) this.#leave(); });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("focus", () => { if (this.canvas.matches(":focus-visible")) this.#go(Math.max(0, this.cursor)); });
    this.canvas.addEventListener("blur", () => this.#leave());
    this.take(sheet);
  }

  take(sheet) {
    const looks = bytesOf(sheet.looks);
    const owners = bytesOf(sheet.owners);
    const now = performance.now();
    if (sheet.at) {
      const cells = new Uint32Array(bytesOf(sheet.at).buffer);
      for (let at = 0; at < cells.length; at++) {
        const cell = cells[at];
        this.looks[cell] = looks[at];
        this.owners[cell] = owners[at];
        this.changedAt[cell] = now;
      }
      this.#flash(cells, now);
      return;
    }
    const isSame = this.looks && this.looks.length === looks.length && this.perCell === sheet.blocks_per_cell;
    const changed = [];
    if (isSame) {
      for (let cell = 0; cell < looks.length; cell++) {
        // A tenant that joins or leaves changes the numbers of others, not their blocks.
        const isOwners = nameOf(owners[cell], sheet.tenants) === nameOf(this.owners[cell], this.tenants);
        if (looks[cell] !== this.looks[cell] || !isOwners) changed.push(cell);
      }
    } else {
      this.changedAt = new Float64Array(looks.length);
    }
    for (const cell of changed) this.changedAt[cell] = now;
    this.looks = looks;
    this.owners = owners;
    this.first = sheet.first_block;
    this.numBlocks = sheet.num_blocks;
    this.perCell = sheet.blocks_per_cell;
    this.tenants = sheet.tenants;
    if (!isSame) this.resize();
    this.#flash(changed, now);
  }

  #flash(cells, now) {
    if (still.matches || cells.length > FLASHED_MAX) {
      this.draw();
      return;
    }
    for (const cell of cells) this.flashes.set(cell, now);
    this.draw();
    this.#animate();
  }

  #animate() {
    if (this.frame || !this.flashes.size) return;
    const step = () => {
      this.frame = 0;
      const now = performance.now();
      const context = this.canvas.getContext("2d");
      context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
      for (const [cell, since] of this.flashes) {
        this.#cell(context, cell);
        const left = 1 - (now - since) / FLASH_MS;
        if (left <= 0) this.flashes.delete(cell);
        else this.#overlay(context, cell, left * 0.9);
      }
      if (this.cursor >= 0) this.#ring(context);
      // Twenty frames a second are enough to see that something has changed.
      if (this.flashes.size) this.frame = setTimeout(() => requestAnimationFrame(step), 40);
    };
    this.frame = requestAnimationFrame(step);
  }

  resize() {
    const width = this.figure.clientWidth || 300;
    const cells = this.looks.length;
    const tall = Math.min(340, Math.max(120, window.innerHeight * 0.4));
    const fitting = Math.floor(Math.sqrt((width * tall) / Math.max(1, cells)));
    this.pitch = Math.min(CELL_MAX, Math.max(CELL_MIN, fitting));
    this.columns = Math.max(1, Math.floor(width / this.pitch));
    // Rows of whole tens are counted more easily.
    if (this.columns > 40) this.columns -= this.columns % 8;
    this.pitch = Math.min(CELL_MAX + 3, width / this.columns);
    this.rows = Math.ceil(cells / this.columns);
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(Math.ceil(this.rows * this.pitch) * scale);
    this.canvas.style.height = `${Math.ceil(this.rows * this.pitch)}px`;
    this.scale = scale;
  }

  colour(cell) {
    const look = colours.LOOKS[this.looks[cell]];
    const by = this.owner.by;
    if (by === "state" || colours.OWNERLESS.includes(look)) return colours.ofState(look);
    const owner = this.owners[cell];
    let base;
    if (by === "tenant") base = owner === NOBODY ? colours.ofState("free") : this.owner.tenants.colour(nameOf(owner, this.tenants));
    else if (by === "tier") base = colours.ofSource(this.tier);
    else base = this.owner.caches.colour(this.cache);
    return look === "ready" ? colours.faded(base, 0.5) : base;
  }

  draw() {
    if (!this.looks) return;
    const context = this.canvas.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let cell = 0; cell < this.looks.length; cell++) this.#cell(context, cell);
    if (this.cursor >= 0) this.#ring(context);
  }

  #box(cell) {
    // Edges lie on whole pixels, so that a square that is drawn again does not bleed into the lines around it.
    const edge = (number) => Math.round(number * this.pitch * this.scale) / this.scale;
    const [column, row] = [cell % this.columns, Math.floor(cell / this.columns)];
    const [left, top] = [edge(column), edge(row)];
    const gap = this.pitch >= 4 ? Math.max(1, Math.round(this.scale)) / this.scale : 0;
    return [left, top, edge(column + 1) - left - gap, edge(row + 1) - top - gap];
  }

  #cell(context, cell) {
    const [left, top, width, height] = this.#box(cell);
    context.fillStyle = this.colour(cell);
    context.fillRect(left, top, width, height);
    const mark = colours.MARKS[colours.LOOKS[this.looks[cell]]];
    if (!mark || width < 5) return;
    context.strokeStyle = mark === "bar" ? "rgb(0 0 0 / 75%)" : "#fff";
    context.lineWidth = Math.max(1, width / 7);
    context.beginPath();
    if (mark === "cross") {
      context.moveTo(left + width * 0.25, top + height * 0.25);
      context.lineTo(left + width * 0.75, top + height * 0.75);
      context.moveTo(left + width * 0.75, top + height * 0.25);
      context.lineTo(left + width * 0.25, top + height * 0.75);
    } else {
      context.moveTo(left + width * 0.2, top + height * 0.5);
      context.lineTo(left + width * 0.8, top + height * 0.5);
    }
    context.stroke();
  }

  #overlay(context, cell, share) {
    const [left, top, width, height] = this.#box(cell);
    // A frame leaves the colour to be seen; where there is no room for one, the cell itself lights up.
    const colour = colours.mode() === "dark" ? `rgb(255 255 255 / ${share})` : `rgb(12 22 32 / ${share})`;
    if (width >= 4) {
      const line = width >= 8 ? 1.5 : 1;
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(left + line / 2, top + line / 2, width - line, height - line);
    } else {
      context.globalAlpha = 0.4;
      context.fillStyle = colour;
      context.fillRect(left, top, width, height);
      context.globalAlpha = 1;
    }
  }

  #ring(context) {
    const [left, top, width, height] = this.#box(this.cursor);
    context.lineWidth = 2;
    context.strokeStyle = colours.mode() === "dark" ? "#000" : "#fff";
    context.strokeRect(left - 2, top - 2, width + 4, height + 4);
    context.strokeStyle = colours.ink();
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
  }

  /** Say in the caption, and to who cannot see it, how full the pool is. */
  caption(counts) {
    const total = Math.max(1, this.numBlocks);
    const usable = room(counts);
    const missing = gone(counts) ? `, ${count(gone(counts))} out of use` : "";
    const many = this.perCell > 1 ? `, ${this.perCell} blocks to a square` : "";
    this.what.replaceChildren(this.cache, el("span", {}, ` · ${this.tier}`));
    this.how.textContent = `${count(used(counts))} of ${count(usable)} used, ${percent(usable ? used(counts) / usable : 0)}${missing}${many}`;
    const held = counts.ready_held ?? 0;
    const shares = { ...counts, held, ready: (counts.ready ?? 0) - held };
    this.share.replaceChildren(...colours.ORDER.filter((look) => look !== "free" && shares[look] > 0).map((look) => {
      const part = el("i");
      part.style.width = `${(100 * shares[look]) / total}%`;
      part.style.background = colours.ofState(look);
      return part;
    }));
    const words = colours.ORDER.filter((look) => shares[look] > 0).map((look) => `${count(shares[look])} ${colours.WORDS[look]}`);
    this.canvas.setAttribute("aria-label", `${this.cache}, ${this.tier}: ${words.join(", ")}`);
  }

  // Pointer and keys

  #point(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left) / this.pitch);
    const row = Math.floor((event.clientY - bounds.top) / this.pitch);
    const cell = row * this.columns + column;
    if (column < 0 || column >= this.columns || cell < 0 || cell >= this.looks.length) this.#leave();
    else if (cell !== this.cursor || this.owner.active !== this) this.#go(cell, event);
    else this.owner.place(event.clientX, event.clientY);
  }

  #key(event) {
    const last = this.looks.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns,
      PageDown: 10 * this.columns, PageUp: -10 * this.columns, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.#leave();
    else if (event.key in steps && !event.ctrlKey && !event.metaKey && !event.altKey) {
      this.#go(Math.min(last, Math.max(0, this.cursor + steps[event.key])));
      event.preventDefault();
    }
  }

  #go(cell, event) {
    this.cursor = cell;
    this.owner.show(this, cell, event);
    this.draw();
  }

  #leave() {
    if (this.cursor < 0) return;
    this.cursor = -1;
    this.owner.hide(this);
    this.draw();
  }

  centre(cell) {
    const bounds = this.canvas.getBoundingClientRect();
    const [left, top, width, height] = this.#box(cell);
    return [bounds.left + left + width, bounds.top + top + height];
  }
}

/** All pools, and the one tip. */
export class BlockMap {
  constructor() {
    this.by = "state";
    this.caches = new colours.Numbers();
    this.tenants = new colours.Numbers();
    this.told = [];
    this.pools = new Map();
    /** The element with the pools of each cache. */
    this.rows = new Map();
    this.active = null;
    this.room = document.getElementById("pools");
    this.tip = document.getElementById("tip");
    this.spoken = document.getElementById("spoken");
    this.asking = 0;
    new ResizeObserver(() => this.resize()).observe(this.room);
  }

  take(sheet) {
    const name = `${sheet.cache}/${sheet.tier}`;
    const known = this.pools.get(name);
    if (sheet.tenants) this.tenants.renew(sheet.tenants);
    if (known) known.take(sheet);
    else if (!sheet.at) {
      const pool = new PoolMap(this, sheet);
      this.pools.set(name, pool);
      pool.caption(this.told.find((one) => one.cache === pool.cache)?.pools[pool.tier] ?? { free: pool.numBlocks });
      this.arrange();
    }
  }

  /** Put the pools in order, and forget those that are no more. */
  arrange() {
    const tier = (pool) => colours.TIERS.indexOf(pool.tier);
    const ordered = [...this.pools.values()].sort((one, other) => byName(one.cache, other.cache) || tier(one) - tier(other));
    // Widths go by the number of cells, so that the cells of a row are of about one kind.
    for (const pool of ordered) pool.figure.style.flexGrow = String(pool.looks.length);
    this.rows = new Map(ordered.map(({ cache }) => [cache, this.rows.get(cache) ?? el("div", { class: "pool-row" })]));
    for (const [cache, row] of this.rows) settle(row, ordered.filter((pool) => pool.cache === cache).map((pool) => pool.figure));
    settle(this.room, [...this.rows.values()]);
    for (const pool of ordered) { pool.resize(); pool.draw(); }
  }

  figures(caches, only) {
    this.caches.renew(caches.map((one) => one.cache));
    this.told = caches;
    let isLess = false;
    for (const [name, pool] of this.pools) {
      const counts = caches.find((one) => one.cache === pool.cache)?.pools[pool.tier];
      if (!counts || (only && only !== pool.cache)) { this.pools.delete(name); isLess = true; } else pool.caption(counts);
    }
    if (isLess) this.arrange();
    if (this.active && !this.pools.has(`${this.active.cache}/${this.active.tier}`)) this.hide(this.active);
    // What the tip tells of grows older, and may change under it.
    if (this.active && !this.asking) this.#askSoon(this.active, this.active.cursor, false);
  }

  resize() {
    for (const pool of this.pools.values()) { pool.resize(); pool.draw(); }
  }

  draw() {
    for (const pool of this.pools.values()) pool.draw();
  }

  // The tip

  show(pool, cell, event) {
    if (this.active && this.active !== pool) { this.active.cursor = -1; this.active.draw(); }
    this.active = pool;
    this.#write(pool, cell, colours.LOOKS[pool.looks[cell]], this.#rows(pool, cell));
    const [left, top] = event ? [event.clientX, event.clientY] : pool.centre(cell);
    this.tip.hidden = false;
    this.place(left, top);
    this.#askSoon(pool, cell, !event);
  }

  /** What the page itself knows of a cell. */
  #rows(pool, cell) {
    const first = pool.first + cell * pool.perCell;
    const last = Math.min(pool.first + pool.numBlocks, first + pool.perCell) - 1;
    const owner = nameOf(pool.owners[cell], pool.tenants);
    const tenant = owner === NOBODY ? "" : owner === OTHERS ? "others" : owner;
    const since = pool.changedAt[cell] ? `for ${age((performance.now() - pool.changedAt[cell]) / 1000)}` : "since the page was opened";
    return [["Block", first === last ? count(first) : `${count(first)} to ${count(last)}`], ["Tenant", tenant], ["Unchanged", since]];
  }

  #askSoon(pool, cell, isSpoken) {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => {
      this.asking = 0;
      this.#ask(pool, cell, isSpoken);
    }, ASK_AFTER_MS);
  }

  async #ask(pool, cell, isSpoken) {
    const look = colours.LOOKS[pool.looks[cell]];
    const rows = this.#rows(pool, cell);
    const query = new URLSearchParams({ cache: pool.cache, tier: pool.tier, block: String(pool.first + cell * pool.perCell) });
    let facts;
    try {
      facts = await ask(`/ui/data/block?${query}`);
    } catch {
      return;
    }
    if (this.active !== pool || pool.cursor !== cell) return;
    const seen = pool.perCell > 1 ? colours.WORDS[look] : colours.WORDS[facts.look];
    const isOther = pool.perCell === 1 && facts.look !== look;
    const more = rows.map(([name, value]) => [name, isOther && name === "Unchanged" ? "for an instant" : value]);
    if (pool.perCell > 1) more.push(["First is", colours.WORDS[facts.look]]);
    const [lease] = facts.leases;
    if (lease) {
      const others = facts.leases.length > 1 ? `; ${facts.leases.length - 1} more` : "";
      more.push(["Lease", `${lease.lease_id}, ${lease.phase}${others}`]);
      more.push(["Age", lease.age_seconds === null ? "from an earlier life" : age(lease.age_seconds)]);
    }
    if (facts.magazines.length) more.push(["Magazine", facts.magazines.join(", ")]);
    if (facts.num_pins) more.push(["Pins", count(facts.num_pins)]);
    if (facts.num_holders > 1) more.push(["Holders", count(facts.num_holders)]);
    if (facts.key_prefix) more.push(["Key", `${facts.key_prefix}… at position ${count(facts.position)}`]);
    if (facts.also_in.length) more.push(["Also in", facts.also_in.join(", ")]);
    this.#write(pool, cell, pool.perCell > 1 ? look : facts.look, more);
    this.#keepInside();
    if (isSpoken) {
      this.spoken.textContent = `${seen}. ${more.filter(([, value]) => value).map((pair) => pair.join(" ")).join(", ")}`;
    }
  }

  #write(pool, cell, look, rows) {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = colours.ofState(look);
    if (colours.MARKS[look]) swatch.dataset.mark = colours.MARKS[look];
    const list = el("dl");
    for (const [name, value] of rows) {
      if (value) list.append(el("dt", {}, name), el("dd", {}, value));
    }
    this.tip.replaceChildren(el("div", { class: "top" }, swatch, colours.WORDS[look]), list);
  }

  place(left, top) {
    this.at = [left, top];
    this.#keepInside();
  }

  #keepInside() {
    const [left, top] = this.at;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const isRight = left + 18 + width > window.innerWidth;
    const isLow = top + 18 + height > window.innerHeight;
    this.tip.style.left = `${Math.max(6, isRight ? Math.min(left - width - 14, window.innerWidth - width - 6) : left + 16)}px`;
    this.tip.style.top = `${Math.max(6, isLow ? top - height - 14 : top + 16)}px`;
  }

  hide(pool) {
    if (this.active !== pool) return;
    this.active = null;
    clearTimeout(this.asking);
    this.asking = 0;
    this.tip.hidden = true;
  }
}
