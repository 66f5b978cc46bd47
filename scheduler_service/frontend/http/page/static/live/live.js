// The live view: what the engine does now, from the frames of /page/feed that `state` (a World) was given.
import { html, useMemo } from "../vendor/preact.js";
import { BlockMaps } from "./block_map.js";
import { Focus, many, useChanges } from "./changes.js";
import { historyOf } from "./history.js";
import { Plots } from "./plots.js";
import { Life, Queue, Requests } from "./requests.js";
import { clock, Timeline } from "./timeline.js";
import { Workers } from "./workers.js";

export { BlockMaps } from "./block_map.js";
export { RecordingView } from "./recording.js";

const EVENTS = 50;

export function LiveView({ state }) {
  const focus = useMemo(() => new Focus(), [state]);
  historyOf(state); // begins now, so that plots and timeline have the first frames
  return html`<div class="live">
    <${Workers} state=${state} />
    <${BlockMaps} state=${state} focus=${focus} />
    <div class="pair">
      <${Timeline} state=${state} focus=${focus} />
      <${Life} state=${state} focus=${focus} />
    </div>
    <div class="pair">
      <${Requests} state=${state} focus=${focus} />
      <div class="stack"><${Queue} state=${state} /><${Events} state=${state} /></div>
    </div>
    <${Plots} state=${state} />
  </div>`;
}

export function Events({ state: world }) {
  useChanges([world], 2);
  const events = world.events.slice(-EVENTS).reverse();
  return html`<section class="live-events" aria-label="Events">
    <h3>Events <span class="counts">${many(world.totals.losses ?? 0, "worker")} lost, ${many(world.totals.preemptions ?? 0, "preemption")}</span></h3>
    <div class="scroll" tabindex="0" role="log" aria-label="Events, the newest first">
      <ol>${events.map((event) => html`<li class=${event.kind}><time>${clock(event.at)}</time> ${event.text}</li>`)}</ol>
      ${!events.length && html`<p class="empty">Nothing has happened yet.</p>`}
    </div>
  </section>`;
}
