// Own the timelines: stacked shares over the time since the page was opened.

import * as colours from "/ui/colours.js";

export const POINTS_MAX = 600;
const LABEL_GAP = 6;
const WINDOWS_SECONDS = [30, 60, 180, 600];

function sized(canvas) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

/** Shares of a whole, one over the other, from 0 to 100 %. */
export class Timeline {
  constructor(canvas, names, colourOf) {
    this.canvas = canvas;
    this.names = names;
    this.colourOf = colourOf;
    this.points = [];
    this.pointed = null;
    this.onPoint = () => {};
    canvas.addEventListener("pointermove", (event) => {
      this.pointed = event.clientX - canvas.getBoundingClientRect().left;
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => { this.pointed = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() { this.points = []; }

  /** Add a point; `shares` are fractions by name, or null where there is nothing to be told. */
  push(seconds, shares) {
    this.points.push({ seconds, shares });
    if (this.points.length > POINTS_MAX) this.points.shift();
    this.draw();
  }

  draw() {
    const [context, width, height] = sized(this.canvas);
    if (!width) return;
    context.font = "11px system-ui, sans-serif";
    // As wide as its longest label is in the font that there is.
    const [left, right, top, bottom] = [Math.ceil(context.measureText("100 %").width) + LABEL_GAP + 2, 4, 8, 20];
    const newest = this.points.at(-1)?.seconds ?? 0;
    const elapsed = newest - (this.points[0]?.seconds ?? 0);
    const span = WINDOWS_SECONDS.find((one) => one >= elapsed) ?? WINDOWS_SECONDS.at(-1);
    const x = (seconds) => width - right - ((newest - seconds) / span) * (width - left - right);
    const y = (share) => height - bottom - share * (height - top - bottom);
    context.fillStyle = colours.soft();
    context.strokeStyle = colours.line();
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      context.beginPath();
      context.moveTo(left, Math.round(y(share)) + 0.5);
      context.lineTo(width - right, Math.round(y(share)) + 0.5);
      context.stroke();
      context.fillText(`${share * 100} %`, left - LABEL_GAP, y(share));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    let free = left;
    for (let third = 3; third >= 0; third--) {
      const seconds = (span / 3) * third;
      const label = seconds ? `${seconds < 60 ? seconds : (seconds / 60).toFixed(seconds % 60 ? 1 : 0)} ${seconds < 60 ? "s" : "min"} ago` : "now";
      const wide = context.measureText(label).width;
      const from = Math.min(Math.max(left, x(newest - seconds) - wide / 2), width - right - wide);
      // A narrow screen has no room for all of them.
      if (from < free) continue;
      context.fillText(label, from, height - 5);
      free = from + wide + LABEL_GAP;
    }
    const seen = this.points.filter((point) => newest - point.seconds <= span);
    this.#areas(context, seen, x, y);
    const shown = this.#pointed(seen, x);
    if (shown) {
      context.strokeStyle = colours.ink();
      context.beginPath();
      context.moveTo(x(shown.seconds), top);
      context.lineTo(x(shown.seconds), height - bottom);
      context.stroke();
    }
    this.onPoint(shown ?? this.points.findLast((point) => point.shares), newest);
  }

  #areas(context, seen, x, y) {
    let run = [];
    const runs = [];
    for (const point of seen) {
      if (point.shares) run.push(point);
      else if (run.length) { runs.push(run); run = []; }
    }
    if (run.length) runs.push(run);
    for (const points of runs) {
      let below = points.map(() => 0);
      for (const name of this.names) {
        const above = points.map((point, at) => below[at] + (point.shares[name] ?? 0));
        context.fillStyle = this.colourOf(name);
        context.beginPath();
        points.forEach((point, at) => context.lineTo(x(point.seconds), y(above[at])));
        for (let at = points.length - 1; at >= 0; at--) context.lineTo(x(points[at].seconds), y(below[at]));
        if (points.length === 1) context.rect(x(points[0].seconds) - 2, y(above[0]), 2, y(below[0]) - y(above[0]));
        context.fill();
        below = above;
      }
    }
  }

  #pointed(seen, x) {
    if (this.pointed === null) return null;
    let best = null;
    for (const point of seen) {
      if (point.shares && (!best || Math.abs(x(point.seconds) - this.pointed) < Math.abs(x(best.seconds) - this.pointed))) best = point;
    }
    return best;
  }
}

/** Draw the last values as bars, the newest at the right. */
export function spark(canvas, values, colour) {
  const [context, width, height] = sized(canvas);
  const most = Math.max(1e-9, ...values);
  const step = 4;
  const fitting = Math.floor(width / step);
  context.fillStyle = colour;
  values.slice(-fitting).forEach((value, at, shown) => {
    const high = value ? Math.max(1.5, (value / most) * (height - 2)) : 0.5;
    context.fillRect(width - (shown.length - at) * step, height - high, step - 1, high);
  });
}
