// When the view draws: in an animation frame after a change, at most `hz` times a second. Browsers run no animation
// frames in a hidden tab, so a hidden tab draws nothing.
import { useEffect, useRef, useState } from "../vendor/preact.js";

const waiting = new Map(); // draw -> when it is due, on the clock of performance.now
let timer = 0;
let frame = 0;

/** Draw at the next multiple of 1 / hz seconds. All that is due shares one timer and one animation frame: a frame's
 * paint and commit cost the browser more than our drawing. */
function drawLater(draw, hz) {
  if (waiting.has(draw)) return;
  const now = performance.now();
  waiting.set(draw, now - (now % (1000 / hz)) + 1000 / hz);
  arm(now);
}

function arm(now) {
  if (frame || !waiting.size) return;
  clearTimeout(timer);
  timer = setTimeout(() => (frame = requestAnimationFrame(drawDue)), Math.min(...waiting.values()) - now);
}

function drawDue() {
  frame = 0;
  const now = performance.now();
  for (const [draw, due] of waiting) {
    if (due > now + 1) continue;
    waiting.delete(draw);
    try {
      draw();
    } catch (problem) {
      reportError(problem); // the other draws go on
    }
  }
  arm(now);
}

/** Call `draw` after changes of any of `sources` (objects with subscribe), and once at the start. `hz` divides 20.
 *
 * `matters`: whether a frame of the feed changes what is drawn. A draw that changes nothing costs the browser a commit.
 */
export function useDrawing(sources, hz, draw, matters = () => true) {
  const latest = useRef(draw);
  latest.current = draw;
  useEffect(() => {
    const run = () => latest.current();
    const ends = sources.map((source) => source.subscribe((frame) => (!frame || matters(frame)) && drawLater(run, hz)));
    const first = requestAnimationFrame(run);
    return () => {
      for (const end of ends) end();
      waiting.delete(run);
      cancelAnimationFrame(first);
    };
  }, [...sources, hz]);
}

/** Render the component again after changes. */
export function useChanges(sources, hz) {
  const [, render] = useState(0);
  useDrawing(sources, hz, () => render((n) => n + 1));
}

/** The width of an element in CSS pixels, kept up to date. */
export function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

/** Requests that the maps light up: those under the pointer, else the selected one. */
export class Focus {
  listeners = new Set();
  hovered = [];
  selected = null;

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  get ids() {
    return this.hovered.length ? this.hovered : this.selected === null ? [] : [this.selected];
  }

  hover(ids) {
    if (ids.length === this.hovered.length && ids.every((id, i) => id === this.hovered[i])) return;
    this.hovered = ids;
    this.#tell();
  }

  select(id) {
    this.selected = id;
    this.#tell();
  }

  #tell() {
    for (const listener of this.listeners) listener();
  }
}

const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12345 is "12,345". */
export const whole = (value) => (Number.isFinite(value) ? counts.format(value) : "–");

/** 12345 is "12.3K"; small numbers keep one decimal. */
export const compact = (value) => (Number.isFinite(value) ? short.format(value) : "–");

export const seconds = (value) =>
  !Number.isFinite(value)
    ? "–"
    : value < 1
      ? `${Math.round(value * 1000)} ms`
      : `${value.toFixed(value < 10 ? 2 : 1)} s`;

export const many = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
