// Own how numbers and tables are written; what is in them is app.js's business.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");
export const percent = (share) => (Number.isFinite(share) ? `${share > 0 && share < 0.0995 ? (share * 100).toFixed(1) : Math.round(share * 100)} %` : "–");
export function rate(number) {
  return number >= 100 || number === 0 ? count(number) : number.toFixed(number >= 10 ? 0 : 1);
}
export function bytes(number) {
  let at = 0;
  while (number >= 1024 && at < BYTES.length - 1) { number /= 1024; at++; }
  return `${number >= 100 || at === 0 ? Math.round(number) : number.toFixed(1)} ${BYTES[at]}`;
}
export function age(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Write only what has changed, so that neither a selection nor a reader loses its place. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** Fill a table: `columns` are [title, isNumber], cells are text or a node; nothing is shown of what has no rows. */
export function table(room, caption, columns, rows, empty) {
  if (!rows.length) {
    room.replaceChildren(...(empty ? [el("p", { class: "empty" }, empty)] : []));
    room._body = null;
    return;
  }
  if (!room._body) {
    const head = el("tr", { role: "row" }, ...columns.map(([title, isNumber]) => el("th", { scope: "col", role: "columnheader", class: isNumber ? "number" : "" }, title)));
    room._body = el("tbody", { role: "rowgroup" });
    // The roles stay where a narrow screen stacks the cells; each has its column's title with it there.
    room.replaceChildren(el("table", { role: "table" }, el("caption", {}, ""), el("thead", { role: "rowgroup" }, head), room._body));
  }
  text(room.querySelector("caption"), caption);
  const body = room._body;
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.appendChild(el("tr", { role: "row" }, ...columns.map(([title, isNumber], column) => el("td", { role: "cell", "data-title": title, class: isNumber ? "number" : column ? "" : "name" }))));
    cells.forEach((cell, column) => {
      const place = row.cells[column];
      if (typeof cell === "string") { if (place.childElementCount) place.replaceChildren(cell); else text(place, cell); }
      else place.replaceChildren(cell);
    });
  });
}

export function meter(share) {
  const bar = el("i");
  bar.style.width = `${Math.round(Math.min(1, share) * 100)}%`;
  return el("span", { class: "meter", "aria-hidden": "true" }, bar);
}

export function badge(words, isWarning) {
  return el("span", { class: "badge", ...(isWarning ? { "data-tone": "warn" } : {}) }, words);
}
