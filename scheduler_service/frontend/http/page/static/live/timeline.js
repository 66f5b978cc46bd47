// Requests as bars over time, on one canvas. The table of requests shows the same to readers without it.
import { html, useRef, useState } from "../vendor/preact.js";
import { coloursOf } from "./block_map.js";
import { many, seconds, useChanges, useDrawing, useWidth } from "./changes.js";
import { historyOf, PHASES } from "./history.js";

const WINDOWS = [15, 60, 180, 600]; // seconds
const AXIS = 18; // CSS pixels
const SPACE = 340;

export function Timeline({ state: world, focus }) {
  const history = historyOf(world);
  const [span, setSpan] = useState(60);
  const [about, setAbout] = useState("");
  const box = useRef();
  const canvas = useRef();
  const legend = useRef();
  const layout = useRef(null);
  const width = useWidth(box);
  useChanges([world], 1);

  const visible = () => {
    const since = world.at - span;
    return [...history.ended.filter((bar) => bar.to > since), ...history.bars.values()];
  };
  const draw = () => {
    if (!width) return;
    const colours = coloursOf(legend.current, [...PHASES, "lit", "ink", "line", "notch"]);
    layout.current = drawBars(canvas.current, visible(), { now: world.at, span, width, colours, lit: focus.ids });
  };
  // In the window of a minute a pixel is about 0.05 s: bars move by ten pixels, for a fifth of the work of 10 hz.
  useDrawing([world, focus], span < 60 ? 5 : 2, draw);

  const barAt = (event) => layout.current?.(event.offsetX, event.offsetY) ?? null;
  const moved = (event) => {
    const bar = barAt(event);
    focus.hover(bar ? [bar.id] : []);
    setAbout(
      bar ? `${bar.id}: ${bar.status || bar.segments.at(-1).phase}, ${seconds((bar.to ?? world.at) - bar.from)}` : "",
    );
  };
  const summary = `Timeline of the last ${span} seconds: ${many(history.bars.size, "request")} going on, ${many(
    visible().length - history.bars.size,
    "request",
  )} ended. The table of requests lists them.`;
  return html`<section class="live-timeline" aria-label="Timeline of requests">
    <header>
      <ul class="legend" ref=${legend}>
        ${PHASES.map((name) => html`<li><i class=${`swatch swatch-${name}`}></i>${name}</li>`)}
        <li hidden><i class="swatch swatch-lit"></i><i class="swatch swatch-ink"></i><i class="swatch swatch-line"></i><i class="swatch swatch-notch"></i></li>
      </ul>
      <label>last <select value=${span} onChange=${(event) => setSpan(Number(event.target.value))}>
        ${WINDOWS.map((one) => html`<option value=${one}>${one < 60 ? `${one} s` : `${one / 60} min`}</option>`)}
      </select></label>
    </header>
    <div class="bars" ref=${box}>
      <canvas ref=${canvas} role="img" aria-label=${summary} onPointerMove=${moved}
        onPointerLeave=${() => (focus.hover([]), setAbout(""))}
        onClick=${(event) => focus.select(barAt(event)?.id ?? null)}></canvas>
    </div>
    <p class="about">${about || (history.bars.size || visible().length ? "\u00a0" : "No request in this time.")}</p>
  </section>`;
}

/** Draw the bars, and return a function that finds the bar at a point. */
function drawBars(canvas, bars, { now, span, width, colours, lit }) {
  const ratio = devicePixelRatio;
  const lanes = bars.reduce((most, bar) => Math.max(most, bar.lane + 1), 8);
  const row = Math.max(3, Math.min(14, Math.floor(SPACE / lanes)));
  const height = lanes * row + AXIS;
  if (canvas.width !== Math.floor(width * ratio)) canvas.width = Math.floor(width * ratio);
  if (canvas.height !== Math.floor(height * ratio)) {
    canvas.height = Math.floor(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  const x = (at) => Math.max(0, width * (1 - (now - at) / span));
  const [ink, line, notch] = colours.slice(PHASES.length + 1);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  drawAxis(context, { now, span, width, height, ink, line, x });

  // All rectangles of one colour at once: a change of fillStyle costs more than a rectangle.
  const gap = row > 5 ? 2 : 1;
  const rectangles = PHASES.map(() => []);
  const notches = [];
  for (const bar of bars) {
    const y = bar.lane * row;
    bar.segments.forEach((segment, i) => {
      const to = bar.segments[i + 1]?.at ?? bar.to ?? now;
      if (to < now - span) return;
      // What runs keeps its full height; what waits is a thinner bar, so that work stands out.
      const thin =
        segment.phase === "queued" || segment.phase === "preempted" || segment.phase === "moving"
          ? Math.floor(row / 4)
          : 0;
      const left = x(segment.at);
      rectangles[PHASES.indexOf(segment.phase)]?.push([
        left,
        y + thin,
        Math.max(0.5, x(to) - left),
        row - gap - 2 * thin,
      ]);
      const before = bar.segments.slice(0, i).findLast((one) => one.worker !== null)?.worker;
      if (before && segment.worker && before !== segment.worker) notches.push([left - 1, y, 2, row - gap]);
    });
    if (row > 5) for (const at of bar.chunks) if (at > now - span) notches.push([x(at), y, 0.75, row - gap]);
  }
  [...rectangles, notches].forEach((list, i) => {
    context.fillStyle = i < PHASES.length ? colours[i] : notch;
    for (const [left, top, wide, high] of list) context.fillRect(left, top, wide, high);
  });
  context.strokeStyle = colours[PHASES.length];
  context.lineWidth = 2;
  for (const bar of bars) {
    if (!lit.includes(bar.id)) continue;
    const left = x(bar.from);
    context.strokeRect(left, bar.lane * row, Math.max(2, x(bar.to ?? now) - left), row - gap);
  }
  return (px, py) => {
    const lane = Math.floor(py / row);
    const at = now - span * (1 - px / width);
    const close = (2 * span) / width; // two pixels beside a short bar find it
    return bars.find((bar) => bar.lane === lane && bar.from - close <= at && at <= (bar.to ?? now) + close) ?? null;
  };
}

function drawAxis(context, { now, span, width, height, ink, line, x }) {
  const most = width / 80;
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300].find((one) => span / one <= most) ?? 600;
  context.font = `${Math.min(AXIS - 4, 0.85 * parseFloat(getComputedStyle(context.canvas).fontSize))}px system-ui, sans-serif`;
  context.textBaseline = "bottom";
  for (let at = Math.ceil((now - span) / step) * step; at <= now; at += step) {
    if (at < 0) continue;
    context.fillStyle = line;
    context.fillRect(Math.round(x(at)), 0, 1, height - AXIS + 4);
    context.fillStyle = ink;
    context.fillText(clock(at), Math.min(x(at) + 3, width - 34), height);
  }
}

/** 75 is "1:15", and 3675 is "1:01:15". */
export function clock(at) {
  const digits = (value) => String(Math.floor(value) % 60).padStart(2, "0");
  return at < 3600
    ? `${Math.floor(at / 60)}:${digits(at)}`
    : `${Math.floor(at / 3600)}:${digits(at / 60)}:${digits(at)}`;
}
