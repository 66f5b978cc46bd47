// Block maps: each pool's blocks as cells of one canvas.
// A map keeps what each cell shows and writes the pixels of the cells that differ, so a frame costs one comparison of
// two byte arrays (0.3 ms for 100,000 blocks) and the changed cells.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { Focus, useChanges, useDrawing, useWidth, whole } from "./changes.js";
import { blocksOf, holdersOf, poolOf, workersOf } from "./world.js";

const MAX_HEIGHT = 320; // CSS pixels of one map
const MANY = 10000; // blocks of a map that is drawn 5 times a second, others 10: its canvas costs the browser 0.5 ms a time
const MAX_CELL = 14; // or a 90th of the map's width, on a wall's screen
const LIT = 4;
const UNKNOWN = 255;
const NAMES = {
  device: ["free", "held", "shared", "cached"],
  host: ["free", "swapped", "swapped and shared", "cached"],
};
const SWATCHES = { device: ["free", "held", "shared", "cached"], host: ["free", "swapped", "swapped", "cached"] };

export class Cells {
  /** `canvas` is filled to `width` CSS pixels with the largest cells that keep it under MAX_HEIGHT. */
  constructor(canvas, number, width, ratio) {
    this.ratio = ratio;
    this.number = number;
    const pixels = Math.max(1, Math.floor(width * ratio));
    this.size = Math.max(1, Math.floor(Math.max(MAX_CELL, width / 90) * ratio));
    while (this.size > 1 && Math.ceil(number / Math.floor(pixels / this.size)) * this.size > MAX_HEIGHT * ratio)
      this.size--;
    this.columns = Math.max(1, Math.floor(pixels / this.size));
    this.gap = this.size >= 4 ? Math.max(1, Math.round(this.size / 8)) : 0;
    canvas.width = pixels;
    canvas.height = Math.max(1, Math.ceil(number / this.columns) * this.size);
    canvas.style.height = `${canvas.height / ratio}px`;
    Object.assign(canvas.dataset, { columns: this.columns, size: this.size }); // for tests, which read pixels
    // The image is made on the processor, so the canvas stays there too: a GPU's canvas would upload it twice.
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.image = this.context.createImageData(canvas.width, canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.shown = new Uint8Array(number).fill(UNKNOWN);
    this.lit = new Uint8Array(number);
    this.colours = "";
  }

  /** `colours`: CSS colours of the four states and of lit cells. Returns the number of cells drawn. */
  draw(states, litBlocks, colours) {
    const { shown, lit, columns, size, pixels } = this;
    const side = size - this.gap;
    const stride = this.image.width;
    lit.fill(0);
    for (const block of litBlocks) if (block < lit.length) lit[block] = LIT;
    const key = `${colours}${litBlocks.length > 0}`;
    if (key !== this.colours) {
      shown.fill(UNKNOWN);
      this.colours = key;
      this.palette = palette(colours, litBlocks.length > 0);
    }
    let first = Infinity;
    let last = -1;
    let drawn = 0;
    for (let block = 0; block < shown.length; block++) {
      const code = states[block] | lit[block];
      if (code === shown[block]) continue;
      shown[block] = code;
      const colour = this.palette[code];
      let start = Math.floor(block / columns) * size * stride + (block % columns) * size;
      for (let y = 0; y < side; y++, start += stride) for (let x = start; x < start + side; x++) pixels[x] = colour;
      if (block < first) first = block;
      last = block;
      drawn++;
    }
    if (drawn) {
      const top = Math.floor(first / columns) * size;
      const bottom = (Math.floor(last / columns) + 1) * size;
      this.context.putImageData(this.image, 0, 0, 0, top, stride, bottom - top);
    }
    return drawn;
  }

  /** The block at a point in CSS pixels, or -1. */
  at(x, y) {
    const column = Math.floor((x * this.ratio) / this.size);
    const block = Math.floor((y * this.ratio) / this.size) * this.columns + column;
    return column >= 0 && column < this.columns && block >= 0 && block < this.number ? block : -1;
  }

  /** Left, top and side of a block's cell in CSS pixels. */
  place(block) {
    const scale = this.size / this.ratio;
    return [(block % this.columns) * scale, Math.floor(block / this.columns) * scale, scale];
  }
}

/** Pixels of the codes 0–3 (states) and 4–7 (lit). While some cells are lit, the others fade towards the free colour. */
function palette(colours, someAreLit) {
  const parts = colours.map((colour) =>
    colour
      .match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number),
  );
  const lit = parts[4];
  const faded = (part) => (someAreLit ? part.map((value, i) => value * 0.4 + parts[0][i] * 0.6) : part);
  const all = [...parts.slice(0, 4).map(faded), lit, lit, lit, lit];
  return all.map(([r, g, b]) => ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0);
}

let colours = new WeakMap(); // legend -> colours by name, until the colour scheme changes

/** Tells when the colour scheme changes: the system's, or the page's choice, which is a style of the document. */
const scheme = {
  listeners: new Set(),
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  },
};
const renewColours = () => {
  colours = new WeakMap();
  for (const listener of scheme.listeners) listener();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renewColours);
new MutationObserver(renewColours).observe(document.documentElement, { attributeFilter: ["style"] });

/** The colours of swatches as the style sheet and the colour scheme have them. */
export function coloursOf(legend, names) {
  if (!colours.has(legend)) colours.set(legend, {});
  const known = colours.get(legend);
  return names.map((name) => (known[name] ??= getComputedStyle(legend.querySelector(`.swatch-${name}`)).backgroundColor));
}

function countsOf(states) {
  const counts = [0, 0, 0, 0];
  for (let block = 0; block < states.length; block++) counts[states[block]]++;
  return counts;
}

function PoolMap({ world, worker, pool, focus, legend }) {
  const canvas = useRef();
  const box = useRef();
  const cells = useRef(null);
  const width = useWidth(box);
  const [block, setBlock] = useState(-1);
  const states = () => world.pools.get(worker)?.[pool] ?? new Uint8Array(0);
  const number = states().length;

  useEffect(() => {
    cells.current = width && number ? new Cells(canvas.current, number, width, devicePixelRatio) : null;
    draw();
  }, [width, number]);

  const draw = () => {
    const map = cells.current;
    if (map === null || states().length !== map.number) return; // another size is rendered first
    const lit = [];
    for (const id of focus.ids) {
      const request = world.requests.get(id);
      if (request?.worker === worker && poolOf(request) === pool) lit.push(...blocksOf(request));
    }
    map.draw(states(), lit, coloursOf(legend.current, [...SWATCHES[pool], "lit"]));
  };
  const matters = (frame) => frame.snapshot || frame.blocks?.[worker]?.[pool];
  useDrawing([world, focus, scheme], number > MANY ? 5 : 10, draw, matters);

  const point = (at) => {
    setBlock(at);
    focus.hover(at < 0 ? [] : holdersOf(world, worker, pool, at).map((request) => request.id));
  };
  const keyed = (event) => {
    const map = cells.current;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: map?.columns, ArrowUp: -map?.columns };
    const jumps = { Home: 0, End: number - 1, Escape: -1 };
    if (map && event.key in steps) point(Math.min(number - 1, Math.max(0, block + steps[event.key])));
    else if (map && event.key in jumps) point(jumps[event.key]);
    else return;
    event.preventDefault();
  };

  const counts = countsOf(states());
  const words = NAMES[pool].map((name, i) => `${whole(counts[i])} ${name}`).filter((_, i) => i < 2 || counts[i]);
  const summary = `${whole(number)} blocks: ${words.join(", ")}`;
  const about = block >= 0 && block < number ? aboutBlock(world, worker, pool, block, states()[block]) : "";
  const [left, top, side] = about && cells.current ? cells.current.place(block) : [0, 0, 0];
  // A map is a slider of block numbers to a screen reader, which then reads the block under the cursor.
  return html`<figure class="pool">
    <figcaption><b>${pool === "host" ? "host pool" : "pool"}</b> <span class="counts">${summary}</span>
      <span class="about">${about}</span></figcaption>
    <div class="cells" ref=${box} hidden=${!number}>
      <canvas ref=${canvas} tabindex="0" role="slider" aria-label=${`Blocks of the ${pool} pool of worker ${worker}`}
        aria-valuemin="0" aria-valuemax=${Math.max(0, number - 1)} aria-valuenow=${Math.max(0, block)}
        aria-valuetext=${about || summary} onKeyDown=${keyed} onBlur=${() => point(-1)}
        onPointerMove=${(e) => cells.current && point(cells.current.at(e.offsetX, e.offsetY))}
        onPointerLeave=${() => point(-1)}></canvas>
      ${about && html`<i class="cursor" style=${{ left: `${left}px`, top: `${top}px`, width: `${side}px`, height: `${side}px` }}></i>`}
    </div>
  </figure>`;
}

function aboutBlock(world, worker, pool, block, state) {
  const names = holdersOf(world, worker, pool, block).map((request) => request.id);
  const more = names.length > 6 ? ` and ${names.length - 6} more` : "";
  return `block ${block}: ${NAMES[pool][state]}${names.length ? ` by ${names.slice(0, 6).join(", ")}${more}` : ""}`;
}

/** All pools of all workers. `focus`: the requests to light, shared with other parts of the page. */
export function BlockMaps({ state: world, focus: given }) {
  const focus = useMemo(() => given ?? new Focus(), [given]);
  const legend = useRef();
  useChanges([world], 2);
  return html`<section class="live-maps" aria-label="Block maps">
    <ul class="legend" ref=${legend}>
      ${["free", "held", "shared", "cached", "swapped", "lit"].map(
        (name) =>
          html`<li><i class=${`swatch swatch-${name}`}></i>${name === "lit" ? "of the request pointed at" : name}</li>`,
      )}
    </ul>
    <div class="maps">${workersOf(world).map(
      ([id, worker]) => html`<section class="worker-maps" key=${id} aria-label=${`Pools of worker ${id}`}>
        <h3>${id} <span class="counts">${worker.state}</span></h3>
        ${
          worker.device_blocks
            ? html`<${PoolMap} world=${world} worker=${id} pool="device" focus=${focus} legend=${legend} />`
            : html`<p class="empty">No pool: the worker has no session.</p>`
        }
        ${worker.host_blocks > 0 && html`<${PoolMap} world=${world} worker=${id} pool="host" focus=${focus} legend=${legend} />`}
      </section>`,
    )}</div>
    ${!world.workers.size && html`<p class="empty">No worker is connected.</p>`}
  </section>`;
}
