// A recording: the frames of every step, fetched in chunks that begin with a key frame, and a slider over them.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { BlockMaps } from "./block_map.js";
import { Focus, many, seconds, whole } from "./changes.js";
import { Life, Queue, Requests } from "./requests.js";
import { Workers } from "./workers.js";
import { World } from "./world.js";

const FIRST = 1; // the number of the first step
const KEPT_CHUNKS = 8;
const SPEEDS = [1, 5, 20, 60]; // steps a second

/** The world at any step of a recording. `fetchChunk(step)` returns the chunk that contains the step. */
export class Recording {
  world = new World();
  #chunks = []; // {from, frames}, the last used at the end
  #chunk = null; // of the world's step
  #next = 0; // frame of the chunk that is applied next

  constructor(fetchChunk) {
    this.fetchChunk = fetchChunk;
  }

  async seek(step) {
    const chunk = await this.#find(step);
    if (chunk !== this.#chunk || step < this.world.step) {
      this.#chunk = chunk;
      this.#next = 0;
    }
    const { frames } = chunk;
    while (this.#next < frames.length && frames[this.#next].step <= step) this.world.apply(frames[this.#next++]);
  }

  async #find(step) {
    let chunk = this.#chunks.find(({ frames }) => frames[0].step <= step && step <= frames.at(-1).step);
    if (!chunk) {
      chunk = await this.fetchChunk(step);
      if (!chunk.frames.length) throw new Error(`the server has no frame of step ${step}`);
    }
    this.#chunks = [...this.#chunks.filter((one) => one !== chunk), chunk].slice(-KEPT_CHUNKS);
    return chunk;
  }
}

async function fetchChunk(step) {
  const answer = await fetch(`/page/recording?from=${step}`);
  if (!answer.ok) throw new Error(`the server answered ${answer.status} to step ${step}`);
  return answer.json();
}

export function RecordingView({ info }) {
  const { name, num_steps, first_at, last_at } = info.recording;
  const recording = useMemo(() => new Recording(fetchChunk), [name]);
  const focus = useMemo(() => new Focus(), [name]);
  const [step, setStep] = useState(FIRST);
  const [shown, setShown] = useState(0); // none yet
  const [speed, setSpeed] = useState(5);
  const [playing, setPlaying] = useState(false);
  const [error, setError] = useState("");
  const wanted = useRef(FIRST);
  const busy = useRef(false);
  const { world } = recording;

  // One seek at a time, always to the newest wish: a slider that is dragged wishes faster than chunks arrive.
  const go = async (to) => {
    wanted.current = Math.max(FIRST, Math.min(num_steps, to));
    setStep(wanted.current);
    if (busy.current) return;
    busy.current = true;
    try {
      let at;
      do {
        at = wanted.current;
        await recording.seek(at);
        setShown(at);
      } while (at !== wanted.current);
      setError("");
    } catch (problem) {
      setPlaying(false);
      setError(problem.message);
    } finally {
      busy.current = false;
    }
  };
  useEffect(() => void go(FIRST), [recording]);
  useEffect(() => {
    if (!playing) return undefined;
    const timer = setInterval(() => {
      if (document.hidden || busy.current) return;
      if (wanted.current >= num_steps) setPlaying(false);
      else go(wanted.current + 1);
    }, 1000 / speed);
    return () => clearInterval(timer);
  }, [playing, speed, recording]);
  const keyed = (event) => {
    if (event.target.matches("input, select, textarea, canvas")) return; // they have their own keys
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 };
    if (!(event.key in steps)) return;
    go(wanted.current + steps[event.key]);
    event.preventDefault();
  };
  const toggle = () => {
    if (!playing && wanted.current >= num_steps) go(FIRST);
    setPlaying(!playing);
  };
  return html`<div class="live recording" onKeyDown=${keyed}>
    <section class="player" aria-label="Steps of the recording">
      <button type="button" onClick=${toggle}>${playing ? "pause" : "play"}</button>
      <button type="button" aria-label="one step back" onClick=${() => go(step - 1)} disabled=${step <= FIRST}>‹</button>
      <input type="range" min=${FIRST} max=${num_steps} value=${step} aria-label="step" aria-valuetext=${`step ${step} of ${num_steps}`}
        onInput=${(event) => (setPlaying(false), go(Number(event.target.value)))} />
      <button type="button" aria-label="one step on" onClick=${() => go(step + 1)} disabled=${step >= num_steps}>›</button>
      <label>steps a second <select value=${speed} onChange=${(event) => setSpeed(Number(event.target.value))}>
        ${SPEEDS.map((one) => html`<option value=${one}>${one}</option>`)}
      </select></label>
      <span class="counts">step ${step} of ${num_steps}, ${seconds(world.at)} of ${seconds(last_at - first_at)}</span>
    </section>
    ${error && html`<p class="error" role="alert">The step cannot be shown: ${error}.</p>`}
    <section class="decisions" aria-label="Decisions of the step">
      <h3>${name}: decisions of step ${shown || step}</h3>
      <ul aria-live=${playing ? "off" : "polite"}>${(world.decisions.length ? world.decisions : [shown ? "nothing" : "reading the recording"]).map((text) => html`<li>${text}</li>`)}</ul>
      <p class="counts">${many(world.totals.running ?? 0, "running request")}, ${whole(world.totals.waiting ?? 0)} waiting</p>
    </section>
    <${Workers} state=${world} still />
    <div class="pair"><${BlockMaps} state=${world} focus=${focus} /><${Life} state=${world} focus=${focus} /></div>
    <div class="pair"><${Requests} state=${world} focus=${focus} /><${Queue} state=${world} /></div>
  </div>`;
}
