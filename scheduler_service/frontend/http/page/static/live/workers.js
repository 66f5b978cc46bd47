// Workers as cards: state, speed, load and step time.
import { html, useRef } from "../vendor/preact.js";
import { compact, seconds, useChanges, useDrawing, whole } from "./changes.js";
import { historyOf } from "./history.js";
import { workersOf } from "./world.js";

/** `still`: of a recording, which has no last minute. */
export function Workers({ state: world, still = false }) {
  useChanges([world], 2);
  return html`<section class="live-workers" aria-label="Workers">
    ${workersOf(world).map(([id, worker]) => html`<${Worker} key=${id} world=${world} id=${id} worker=${worker} still=${still} />`)}
  </section>`;
}

const WELL = new Set(["serving", "ready"]);
const GOING = new Set(["starting", "draining", "drained", "connecting", "loading"]);

function Worker({ world, id, worker, still }) {
  const health = WELL.has(worker.state) ? "well" : GOING.has(worker.state) ? "going" : "ill";
  const used = worker.device_blocks ? 1 - worker.free_device / worker.device_blocks : 0;
  const figures = {
    "tokens/s": compact(worker.tokens_per_second),
    running: whole(worker.running),
    swapped: whole(worker.swapped),
    step: worker.step_ms ? seconds(worker.step_ms / 1000) : "–",
    "blocks held": worker.device_blocks ? `${Math.round(100 * used)} %` : "–",
    preemptions: whole(worker.preemptions),
    losses: whole(worker.losses),
  };
  for (const [kind, [held, cached]] of Object.entries(worker.layer_groups ?? {})) {
    figures[`${kind}: held + cached`] = `${whole(held)} + ${whole(cached)}`;
  }
  return html`<article class=${`worker ${health}`} aria-label=${`Worker ${id}, ${worker.state}`}>
    <header><h3>${id}</h3><span class="status">${worker.state}</span></header>
    ${!still && html`<${Spark} state=${world} worker=${id} />`}
    <dl>${Object.entries(figures).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${worker.error && html`<p class="error">${worker.error}</p>`}
  </article>`;
}

/** A worker's speed as a line of a card. */
function Spark({ state: world, worker }) {
  const canvas = useRef();
  useDrawing([world], 1, () => {
    const { width, height } = canvas.current;
    const values = historyOf(world)
      .samples.slice(-60)
      .map((sample) => sample.speeds[worker] ?? 0);
    const most = Math.max(1, ...values);
    const context = canvas.current.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.strokeStyle = getComputedStyle(canvas.current).color;
    context.lineWidth = 3;
    context.beginPath();
    values.forEach((value, i) =>
      context.lineTo(width - ((values.length - 1 - i) * width) / 59, height - 3 - (value / most) * (height - 6)),
    );
    context.stroke();
  });
  return html`<canvas class="spark" ref=${canvas} width="240" height="64" role="img" aria-label="Tokens a second in the last minute"></canvas>`;
}
