// The requests in words: the queue, the table beside the timeline, and the life of one request.
import { html, useState } from "../vendor/preact.js";
import { compact, many, seconds, useChanges, whole } from "./changes.js";
import { historyOf } from "./history.js";
import { clock } from "./timeline.js";
import { blocksOf } from "./world.js";

const ROWS = 25; // of the table, twice as many as it has room for; the rest on demand
const MAX_ROWS = 1000;

const isWaiting = (request) => request.state === "waiting";
const inQueue = (one, two) => (one.place ?? Infinity) - (two.place ?? Infinity);

/** Waiting requests by tenant and priority, with the place of the first of each. */
export function Queue({ state: world }) {
  useChanges([world], 2);
  const waiting = [...world.requests.values()].filter(isWaiting).sort(inQueue);
  const groups = new Map();
  for (const request of waiting) {
    const key = `${request.tenant}\n${request.priority}`;
    const group = groups.get(key) ?? { request, number: 0, tokens: 0 };
    group.number++;
    group.tokens += request.prompt_tokens;
    groups.set(key, group);
  }
  const total = world.totals.waiting ?? 0;
  return html`<section class="live-queue" aria-label="Queue">
    <h3>Queue <span class="counts">${many(total, "request")}${total > waiting.length ? `, the first ${whole(waiting.length)} shown` : ""}</span></h3>
    ${waiting.length > 0 && waiting[0].reason && html`<p class="about">The head waits: ${waiting[0].reason}.</p>`}
    ${!total && html`<p class="empty">No request waits.</p>`}
    ${
      groups.size > 0 &&
      html`<table>
      <thead><tr><th scope="col">tenant</th><th scope="col">priority</th><th scope="col">waiting</th><th scope="col">prompt tokens</th><th scope="col">first place</th><th scope="col">first waits</th></tr></thead>
      <tbody>${[...groups.values()].slice(0, 12).map(
        ({ request, number, tokens }) => html`<tr key=${`${request.tenant} ${request.priority}`}>
          <td>${request.tenant || "–"}</td><td>${request.priority}</td><td>${whole(number)}</td><td>${compact(tokens)}</td>
          <td>${request.place == null ? "–" : request.place + 1}</td><td>${seconds(world.at - request.arrived)}</td>
        </tr>`,
      )}</tbody>
    </table>`
    }
    ${groups.size > 12 && html`<p class="empty">and ${groups.size - 12} more tenants and priorities</p>`}
  </section>`;
}

// Requests on workers first, the oldest at the top; then the queue in its order.
const inOrder = (one, two) =>
  isWaiting(one) - isWaiting(two) || (isWaiting(one) ? inQueue(one, two) : one.arrived - two.arrived);
const going = (world) => [...world.requests.values()].sort(inOrder);
const statusOf = (bar) => (bar.status || "ended").replaceAll("_", " ");
const SHOWN = {
  all: going,
  "on workers": (world) => going(world).filter((request) => !isWaiting(request)),
  waiting: (world) => going(world).filter(isWaiting),
  ended: (world) =>
    historyOf(world)
      .ended.toReversed()
      .map((bar) => ({ ...bar.request, state: statusOf(bar) })),
};

export function Requests({ state: world, focus }) {
  const [shown, setShown] = useState("all");
  const [all, setAll] = useState(false);
  useChanges([world], 1); // two columns of all rows change at once, and to lay out 50 rows took 4 ms
  useChanges([focus], 10);
  const found = SHOWN[shown](world);
  const rows = found.slice(0, all ? MAX_ROWS : ROWS);
  return html`<section class="live-requests" aria-label="Requests">
    <header>
      <h3>Requests <span class="counts">${whole(found.length)}</span></h3>
      <div class="choices" role="group" aria-label="Requests that are shown">
        ${Object.keys(SHOWN).map((name) => html`<button type="button" aria-pressed=${shown === name} onClick=${() => setShown(name)}>${name}</button>`)}
      </div>
    </header>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of requests">
      <table>
        <thead><tr>
          <th scope="col">request</th><th scope="col">state</th><th scope="col">worker</th><th scope="col">tenant</th><th scope="col">priority</th>
          <th scope="col">prompt</th><th scope="col">cached</th><th scope="col">computed</th><th scope="col">output</th><th scope="col">blocks</th><th scope="col">preempted</th>
        </tr></thead>
        <tbody>${rows.map((request) => html`<${Row} key=${`${request.id} ${request.arrived}`} request=${request} focus=${focus} />`)}</tbody>
      </table>
      ${!rows.length && html`<p class="empty">No request.</p>`}
    </div>
    ${found.length > ROWS && html`<button type="button" onClick=${() => setAll(!all)}>${all ? `first ${ROWS}` : `all ${whole(Math.min(found.length, MAX_ROWS))}`}</button>`}
  </section>`;
}

function Row({ request, focus }) {
  const { id } = request;
  const state = isWaiting(request) && request.place != null ? `waiting, place ${request.place + 1}` : request.state;
  return html`<tr class=${focus.selected === id ? "selected" : ""} onPointerEnter=${() => focus.hover([id])} onPointerLeave=${() => focus.hover([])}>
    <th scope="row"><button type="button" class="name" title=${id} aria-pressed=${focus.selected === id}
      onFocus=${() => focus.hover([id])} onBlur=${() => focus.hover([])}
      onClick=${() => focus.select(focus.selected === id ? null : id)}>${id}</button></th>
    <td><i class=${`swatch swatch-${isWaiting(request) ? "queued" : request.state}`}></i>${state}</td>
    <td>${request.worker ?? "–"}</td><td>${request.tenant || "–"}</td><td>${request.priority}</td>
    <td>${whole(request.prompt_tokens)}</td><td>${whole(request.cached_tokens)}</td><td>${whole(request.computed_tokens)}</td><td>${whole(request.output_tokens)}</td>
    <td>${whole(blocksOf(request).size)}</td><td>${(request.preemptions ?? 0) + (request.recomputes ?? 0) || ""}</td>
  </tr>`;
}

/** The life, figures and blocks of the selected request. */
export function Life({ state: world, focus }) {
  useChanges([world, focus], 2);
  const bar = focus.selected === null ? undefined : historyOf(world).find(focus.selected);
  if (!bar) return null;
  const { request } = bar;
  const blocks = [...blocksOf(request)];
  const figures = {
    tenant: request.tenant || "–",
    priority: request.priority,
    adapter: request.adapter || "–",
    prompt: `${many(request.prompt_tokens, "token")}, ${whole(request.cached_tokens)} cached`,
    computed: many(request.computed_tokens, "token"),
    output: many(request.output_tokens, "token"),
    "first token": bar.first > bar.from ? `after ${seconds(bar.first - bar.from)}` : "–",
    preemptions: `${whole(request.preemptions)} swapped, ${whole(request.recomputes)} recomputed`,
    moves: whole(request.moves),
  };
  return html`<section class="live-life" aria-label=${`Request ${bar.id}`}>
    <header><h3>${bar.id}</h3><button type="button" onClick=${() => focus.select(null)}>close</button></header>
    <p>${bar.to === null ? `${request.state}${request.worker ? ` on ${request.worker}` : ""}` : `${statusOf(bar)} after ${seconds(bar.to - bar.from)}`}
      ${bar.error && html`<span class="error">: ${bar.error}</span>`}</p>
    <dl>${Object.entries(figures).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <ol>${bar.segments.slice(-40).map((segment, i, list) => {
      const to = list[i + 1]?.at ?? bar.to ?? world.at;
      return html`<li><i class=${`swatch swatch-${segment.phase}`}></i>${clock(segment.at)} ${segment.phase}
        ${segment.worker ? ` on ${segment.worker}` : ""} for ${seconds(Math.max(0, to - segment.at))}
        ${segment.reason && segment.reason !== list[i - 1]?.reason && html`<span class="why">${segment.reason}</span>`}</li>`;
    })}</ol>
    ${
      blocks.length > 0 &&
      html`<p class="blocks">${many(blocks.length, "block")}: ${blocks.slice(0, 200).join(" ")}${blocks.length > 200 ? " …" : ""}</p>`
    }
  </section>`;
}
