// Rates, latencies and hit rates of the last minutes. uPlot draws; this file says what and how.
import uPlot from "../vendor/uPlot.esm.js";
import { html, useEffect, useRef } from "../vendor/preact.js";
import { compact, seconds, useDrawing, useWidth } from "./changes.js";
import { historyOf } from "./history.js";

const percent = (value) => (Number.isFinite(value) ? `${value.toFixed(0)} %` : "–");
const PLOTS = [
  { title: "Generated tokens a second", words: compact, lines: { output: "all workers" } },
  { title: "Prompt tokens a second", words: compact, lines: { prompt: "all workers" } },
  { title: "Requests", words: compact, lines: { running: "running", waiting: "waiting", swapped: "swapped" } },
  { title: "Time to the first token", words: seconds, lines: { first50: "median", first95: "95 %" }, least: 0.01 },
  { title: "Time between tokens", words: seconds, lines: { token50: "median of ended requests" }, least: 0.01 },
  { title: "Prompt tokens found in the cache", words: percent, lines: { hits: "hits" }, most: 100 },
  { title: "Preemptions a second", words: compact, lines: { preemptions: "preemptions" } },
];

export function Plots({ state: world }) {
  return html`<section class="live-plots" aria-label="Rates and latencies of the last minutes">
    ${PLOTS.map((plot) => html`<${Plot} world=${world} ...${plot} />`)}
  </section>`;
}

function Plot({ world, title, words, lines, most, least = 1 }) {
  const box = useRef();
  const plot = useRef(null);
  const legend = useRef();
  const width = useWidth(box);
  const names = Object.keys(lines);
  useEffect(() => {
    if (!width) return undefined;
    // Functions, because the colour scheme may change while the plot lives.
    const colour = (name) => () => getComputedStyle(box.current)[name];
    const grid = { stroke: colour("borderTopColor"), width: 1 };
    const axis = { stroke: colour("color"), grid, ticks: { show: false }, font: "11px system-ui" };
    plot.current = new uPlot(
      {
        ...{ width, height: 110, legend: { show: false }, cursor: { show: false }, padding: [6, 16, 0, 0] },
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, most ?? Math.max(high * 1.1, least)] } },
        axes: [
          {
            ...axis,
            size: 18,
            gap: 2,
            space: 60,
            values: (_, splits) => splits.map((one) => (one ? `${one} s` : "now")),
          },
          {
            ...axis,
            size: 44,
            gap: 4,
            space: 26,
            values: (_, splits) => splits.map((one) => words(one).replace("–", "")),
          },
        ],
        series: [
          {},
          ...names.map((_, i) => ({
            stroke: stroke(legend.current, i),
            width: 1.5,
            points: { show: false },
            spanGaps: true,
          })),
        ],
      },
      [[], ...names.map(() => [])],
      box.current,
    );
    draw();
    return () => plot.current.destroy();
  }, [width]);
  const draw = () => {
    const { samples } = historyOf(world);
    if (!samples.length) return;
    const last = samples.at(-1);
    plot.current?.setData([
      samples.map((one) => one.at - last.at),
      ...names.map((name) => samples.map((one) => one[name] ?? null)),
    ]);
    legend.current
      .querySelectorAll(".value")
      .forEach((value, i) => (value.textContent = words(last[names[i]] ?? NaN)));
  };
  useDrawing([world], 1, draw);
  return html`<figure class="plot">
    <figcaption ref=${legend}><b>${title}</b>
      ${names.map((name, i) => html`<span><i class=${`swatch swatch-line${i}`}></i>${lines[name]} <span class="value">–</span></span>`)}
    </figcaption>
    <div class="drawing" ref=${box}></div>
  </figure>`;
}

const stroke = (legend, i) => () => getComputedStyle(legend.querySelector(`.swatch-line${i}`)).backgroundColor;
