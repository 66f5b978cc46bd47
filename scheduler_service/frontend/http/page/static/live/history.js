// What the page remembers of frames: requests as bars with phases, and samples once a second.
// All of it is bounded: bars of the last KEPT_SECONDS (MAX_BARS at most), and as many samples.

export const KEPT_SECONDS = 600;
const MAX_BARS = 2000; // ended requests
const MAX_SEGMENTS = 200; // of one bar: a request that is preempted for hours loses its oldest phases
const LATENCY_SECONDS = 15; // latencies are percentiles of this many last seconds

export const PHASES = ["queued", "prefill", "decode", "preempted", "swapped", "moving", "stalled"];

const histories = new WeakMap();

/** The history of a World, begun at the first call. It goes on while no part of the page shows it. */
export function historyOf(world) {
  if (!histories.has(world)) histories.set(world, new History(world));
  return histories.get(world);
}

class History {
  constructor(world) {
    this.world = world;
    this.#clear();
    if (world.at) this.observe({ snapshot: true, requests: Object.fromEntries(world.requests) });
    world.subscribe((frame) => this.observe(frame));
  }

  #clear() {
    this.bars = new Map(); // id -> bar of a request that goes on
    this.ended = []; // bars, oldest end first
    this.lanes = []; // rows of the timeline: the bar that has it, or null
    this.samples = []; // {at, ...}, see #sample
    this.latencies = []; // {at, first, token}: seconds to the first token, and between later ones
    this.last = null;
    this.at = 0;
  }

  observe(frame) {
    const { world } = this;
    if (world.at < this.at) this.#clear(); // another run of the server, or a recording was turned back
    this.at = world.at;
    for (const end of frame.ended ?? []) this.#end(end.id, end);
    if (frame.snapshot) {
      const lost = [...this.bars.keys()].filter((id) => !world.requests.has(id));
      for (const id of lost) this.#end(id, { status: "ended while the page was not connected" });
    }
    for (const [id, fields] of Object.entries(frame.requests ?? {})) {
      if (fields === null) this.#end(id, { status: "ended" });
      else this.#see(world.requests.get(id), frame);
    }
    this.#sample();
    this.#forget();
  }

  #see(request, frame) {
    let bar = this.bars.get(request.id);
    if (!bar) {
      const lane = this.lanes.indexOf(null);
      bar = {
        ...{ id: request.id, request, lane: lane < 0 ? this.lanes.length : lane, from: request.arrived, to: null },
        ...{ segments: [], chunks: [], first: null, status: "", error: "" },
        ...{ worker: null, computed: 0, moves: request.moves },
      };
      this.lanes[bar.lane] = bar;
      this.bars.set(bar.id, bar);
    }
    bar.request = request;
    const last = bar.segments.at(-1);
    const phase = phaseOf(request, bar, last);
    if (last?.phase !== phase || last.worker !== request.worker) {
      const at = last ? this.at : request.arrived;
      // A request that was first seen on a worker waited before that, and the feed did not show it.
      const late = !last && phase !== "queued" && this.at > at;
      if (late) bar.segments.push({ at, phase: "queued", worker: null, reason: "" });
      bar.segments.push({ at: late ? this.at : at, phase, worker: request.worker, reason: request.reason ?? "" });
      if (bar.segments.length > MAX_SEGMENTS) bar.segments.splice(1, 1);
    } else if (request.reason) last.reason = request.reason;
    if (phase === "prefill" && request.computed_tokens > bar.computed && bar.chunks.length < MAX_SEGMENTS) {
      bar.chunks.push(this.at);
    }
    bar.computed = request.computed_tokens ?? 0;
    bar.worker = request.worker ?? bar.worker;
    if (request.worker) bar.moves = request.moves;
    if (bar.first === null && request.output_tokens > 0) {
      bar.first = this.at;
      // Not of requests that had tokens when the page was opened or connected again.
      if (last && !frame.snapshot) this.latencies.push({ at: this.at, first: this.at - bar.from, token: null });
    }
  }

  #end(id, { status, error = "" }) {
    const bar = this.bars.get(id);
    if (!bar) return;
    this.bars.delete(id);
    this.lanes[bar.lane] = null;
    while (this.lanes.length && this.lanes.at(-1) === null) this.lanes.pop();
    Object.assign(bar, { to: this.at, status, error });
    bar.request = { ...bar.request, tables: {} };
    this.ended.push(bar);
    const tokens = bar.request.output_tokens ?? 0;
    if (bar.first !== null && bar.first > bar.from && tokens > 1) {
      this.latencies.push({ at: this.at, first: null, token: (this.at - bar.first) / (tokens - 1) });
    }
  }

  #sample() {
    const { at, totals, workers } = this.world;
    const last = this.last;
    if (last && at - last.at < 1) return;
    this.last = { at, ...totals };
    if (!last) return;
    const rate = (name) => (totals[name] >= last[name] ? (totals[name] - last[name]) / (at - last.at) : null);
    const prompt = totals.prompt_tokens - last.prompt_tokens;
    const recent = this.latencies.filter((one) => one.at > at - LATENCY_SECONDS);
    this.samples.push({
      at,
      output: rate("output_tokens"),
      prompt: rate("prompt_tokens"),
      hits: prompt > 0 ? Math.min(100, (100 * (totals.cached_tokens - last.cached_tokens)) / prompt) : null,
      preemptions: rate("preemptions"),
      running: totals.running,
      waiting: totals.waiting,
      swapped: totals.swapped,
      first50: percentile(recent, "first", 0.5),
      first95: percentile(recent, "first", 0.95),
      token50: percentile(recent, "token", 0.5),
      speeds: Object.fromEntries([...workers].map(([id, worker]) => [id, worker.tokens_per_second])),
    });
  }

  #forget() {
    const since = this.at - KEPT_SECONDS;
    const keep = (list, from) => {
      let old = 0;
      while (old < list.length && (from(list[old]) < since || list.length - old > MAX_BARS)) old++;
      if (old) list.splice(0, old);
    };
    keep(this.ended, (bar) => bar.to);
    keep(this.samples, (sample) => sample.at);
    keep(this.latencies, (one) => one.at);
  }

  /** The bar of a request that goes on or has ended within the kept time. */
  find(id) {
    return this.bars.get(id) ?? this.ended.findLast((bar) => bar.id === id);
  }
}

/** A waiting request is queued until a worker has had it. After that its worker was lost or drained, or took its blocks. */
function phaseOf(request, bar, last) {
  if (request.state !== "waiting") return request.state;
  if (bar.worker === null) return "queued";
  if (last && last.worker === null) return last.phase;
  return request.moves > bar.moves ? "moving" : "preempted";
}

function percentile(list, name, share) {
  const values = list
    .map((one) => one[name])
    .filter((value) => value !== null)
    .sort((a, b) => a - b);
  return values.length ? values[Math.min(values.length - 1, Math.floor(share * values.length))] : null;
}
