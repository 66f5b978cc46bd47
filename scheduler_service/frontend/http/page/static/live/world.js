// What the frames of /page/feed or of a recording say, as plain maps. docs/page.md describes the frames.
// World knows nothing of time past (history.js does) and nothing of the screen.

const MAX_EVENTS = 200;

export class World {
  constructor() {
    this.listeners = new Set();
    this.clear();
  }

  clear() {
    this.at = 0;
    this.step = null;
    this.decisions = [];
    this.workers = new Map(); // id -> fields
    this.pools = new Map(); // id -> {device, host}: Uint8Array, a digit of the feed for each block
    this.requests = new Map(); // id -> fields; tables: {output: [block, ...]}
    this.totals = {};
    this.events = []; // oldest first
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  apply(frame) {
    if (frame.snapshot) {
      // Events are kept: a page that lost its connection for a second still shows what happened before.
      const events = frame.at >= this.at ? this.events : [];
      this.clear();
      this.events = events;
    }
    this.at = frame.at ?? this.at;
    this.step = frame.step ?? this.step;
    this.decisions = frame.decisions ?? [];
    for (const [id, fields] of Object.entries(frame.workers ?? {})) this.#worker(id, fields);
    for (const [id, pools] of Object.entries(frame.blocks ?? {})) {
      for (const [name, runs] of Object.entries(pools)) write(this.#pool(id)[name], runs);
    }
    // An id that is used again is in `ended` and in `requests` of one frame: the old request goes first.
    for (const { id } of frame.ended ?? []) this.requests.delete(id);
    for (const [id, fields] of Object.entries(frame.requests ?? {})) this.#request(id, fields);
    Object.assign(this.totals, frame.totals);
    if (frame.events) this.events = [...this.events, ...frame.events].slice(-MAX_EVENTS);
    for (const listener of this.listeners) listener(frame);
  }

  #worker(id, fields) {
    if (fields === null) {
      this.workers.delete(id);
      this.pools.delete(id);
      return;
    }
    const worker = Object.assign(this.workers.get(id) ?? {}, fields);
    this.workers.set(id, worker);
    const pools = this.#pool(id);
    for (const name of ["device", "host"]) {
      const size = worker[`${name}_blocks`] ?? 0;
      if (pools[name].length !== size) pools[name] = new Uint8Array(size); // another session: all blocks are free
    }
  }

  #pool(id) {
    if (!this.pools.has(id)) this.pools.set(id, { device: new Uint8Array(0), host: new Uint8Array(0) });
    return this.pools.get(id);
  }

  #request(id, fields) {
    if (fields === null) {
      this.requests.delete(id);
      return;
    }
    const known = "arrived" in fields ? undefined : this.requests.get(id); // only a new request has `arrived`
    const request = known ?? { id, tables: {} };
    for (const name in fields) if (name !== "tables") request[name] = fields[name];
    for (const [output, [from, blocks]] of Object.entries(fields.tables ?? {})) {
      const table = [...(request.tables[output] ?? []).slice(0, from), ...blocks];
      if (table.length) request.tables[output] = table;
      else delete request.tables[output];
    }
    this.requests.set(id, request);
  }
}

function write(states, runs) {
  for (const [first, digits] of runs) {
    const end = Math.min(digits.length, states.length - first);
    for (let i = 0; i < end; i++) states[first + i] = digits.charCodeAt(i) - 48;
  }
}

/** The workers in the order of their names: snapshots may have another. */
export const workersOf = (world) => [...world.workers].sort(([one], [two]) => (one < two ? -1 : 1));

/** The pool that a request's tables point into: a swapped request's blocks are on its worker's host. */
export const poolOf = (request) => (request.state === "swapped" ? "host" : "device");

/** The distinct blocks of a request. */
export function blocksOf(request) {
  const blocks = new Set();
  for (const table of Object.values(request.tables)) for (const block of table) if (block >= 0) blocks.add(block);
  return blocks;
}

/** The requests whose tables contain a block. A scan on hover is cheaper than an index kept at every frame. */
export function holdersOf(world, worker, pool, block) {
  const found = [];
  for (const request of world.requests.values()) {
    if (request.worker !== worker || poolOf(request) !== pool) continue;
    if (Object.values(request.tables).some((table) => table.includes(block))) found.push(request);
  }
  return found;
}
