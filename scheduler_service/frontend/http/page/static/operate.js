// Operate: an operator's commands. Learn: experiments that are worth a look at the live view.
import { html, useState } from "./vendor/preact.js";
import { AnswerView } from "./answer.js";
import { Answer, checked, read } from "./chat.js";
import { useChanges } from "./live/changes.js";
import { workersOf } from "./live/world.js";

async function send(key, method, path, body) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const answer = await checked(await fetch(path, { method, headers, body: body && JSON.stringify(body) }));
  return answer.json();
}

export function Operate({ state: world, accessKey }) {
  useChanges([world], 2);
  const [said, setSaid] = useState("");
  const [adapter, setAdapter] = useState("");
  const [adapters, setAdapters] = useState(null);
  const run = (what, ...command) =>
    send(accessKey, ...command).then((found) => (setSaid(`${what}: done`), found)).catch((error) => setSaid(`${what}: ${error.message}`));
  const list = () => run("list adapters", "GET", "/page/adapters").then((found) => found && setAdapters(found.adapters));
  const named = encodeURIComponent(adapter);
  return html`<div class="operate">
    <section><h3>Workers</h3>
      <p>A drained worker takes no new requests. Its requests finish or move to other workers.</p>
      <ul>${workersOf(world).map(([id, worker]) => html`<li key=${id}>
        ${id} <span class="quiet">${worker.state}</span>
        <button type="button" onClick=${() => run(`drain ${id}`, "POST", "/page/drain", { worker: id })}>Drain</button>
        <button type="button" onClick=${() => run(`undrain ${id}`, "POST", "/page/undrain", { worker: id })}>Undrain</button>
      </li>`)}</ul></section>
    <section><h3>Prefix cache</h3>
      <p>Flush makes all workers forget cached blocks. Running requests keep theirs.</p>
      <button type="button" onClick=${() => run("flush", "POST", "/page/flush")}>Flush</button></section>
    <section><h3>Adapters</h3>
      <label for="adapter">Name</label> <input id="adapter" value=${adapter} onInput=${(event) => setAdapter(event.target.value)} />
      <button type="button" disabled=${!adapter} onClick=${() => run(`load ${adapter}`, "POST", `/page/adapters/${named}`).then(list)}>Load</button>
      <button type="button" disabled=${!adapter} onClick=${() => run(`unload ${adapter}`, "DELETE", `/page/adapters/${named}`).then(list)}>Unload</button>
      <button type="button" onClick=${list}>List</button>
      ${adapters && html`<ul>${adapters.map((one) => html`<li key=${one.name}>${one.name} <span class="quiet">${one.num_bytes} bytes</span></li>`)}</ul>`}
      ${adapters && !adapters.length && html`<p>No adapter is loaded.</p>`}</section>
    <p role="status">${said}</p>
  </div>`;
}

const LONG = "A scheduler shares the memory of its workers among requests. ".repeat(40);
const EXPERIMENTS = [
  {
    name: "Fill the pool",
    about: "Sixteen prompts with outputs of 300 tokens want about 750 blocks of 16 tokens. In a small pool, watch the map fill up, and the newest requests wait or lose their blocks.",
    // One call, because a browser has at most six connections to a server.
    request: { prompt: Array.from({ length: 16 }, (_, i) => `${i} ${LONG}`), max_tokens: 300, ignore_eos: true },
  },
  {
    name: "Share a prefix",
    about: "One prompt, four outputs: they hold the prompt's blocks together. The last block is copied before each output writes into it.",
    request: { prompt: LONG, n: 4, max_tokens: 200, ignore_eos: true },
  },
];

const STREAM = { prompt: "A worker can be lost at any time, because", max_tokens: 300, temperature: 0.2, ignore_eos: true, stream: true, stream_options: { include_usage: true } };
const TEXTS_BEFORE_KILL = 10;

/** Begin a stream and kill the worker. `say` gets what happens, in words. */
async function killDuring(answer, key, say) {
  say("A stream begins.");
  let longest = 0;
  let at = performance.now();
  const begun = new Promise((done) =>
    answer.subscribe(() => {
      const now = performance.now();
      if (answer.texts.length > 1) longest = Math.max(longest, now - at); // the first text waits for the prompt
      at = now;
      if (answer.texts.length >= TEXTS_BEFORE_KILL) done();
    }),
  );
  const reading = read(answer, STREAM, key, undefined, "/v1/completions");
  await Promise.race([begun, reading]);
  await send(key, "POST", "/page/learn/kill-worker", {});
  say("The worker is killed. The stream waits for the next one.");
  await reading;
  return `Kill the worker: the stream waited ${(longest / 1000).toFixed(1)} s, and has all of its ${answer.usage?.completion_tokens} tokens.`;
}

/** Experiments beside the live view, with a server that `pagewire serve` started. */
export function Learn({ accessKey }) {
  const [said, setSaid] = useState("");
  const [stream, setStream] = useState(null); // the Answer of the last one that saw a worker's death
  const [kills, setKills] = useState(false);
  const run = ({ name, request }) => {
    setSaid(`${name}: under way`);
    send(accessKey, "POST", "/v1/completions", request).then(
      () => setSaid(`${name}: done`),
      (error) => setSaid(`${name}: ${error.message}`),
    );
  };
  const renew = (small) =>
    send(accessKey, "POST", "/page/learn/kill-worker", { small_pool: small }).then(
      () => setSaid("The worker starts again, which takes some seconds."),
      (error) => setSaid(`The worker stays: ${error.message}`),
    );
  const kill = async () => {
    const answer = new Answer();
    setStream(answer);
    setKills(true);
    await killDuring(answer, accessKey, setSaid).then(setSaid, (error) => setSaid(`Kill the worker: ${error.message}`));
    setKills(false);
  };
  return html`<section class="learn" aria-label="Experiments"><ul>
    <li><button type="button" onClick=${() => renew(true)}>Small pool</button> <button type="button" onClick=${() => renew(false)}>Whole pool</button> <span>The worker starts again with 512 blocks, or with all that it had. Requests go on, and memory becomes scarce soon.</span></li>
    ${EXPERIMENTS.map((one) => html`<li key=${one.name}><button type="button" onClick=${() => run(one)}>${one.name}</button> <span>${one.about}</span></li>`)}
    <li><button type="button" disabled=${kills} onClick=${kill}>Kill the worker</button> <span>A stream begins, and its worker is killed. Requests go back to the queue with the tokens that they have. The stream pauses, and goes on when a worker is there again.</span></li>
    </ul><p role="status">${said}</p>${stream && html`<${AnswerView} answer=${stream} />`}</section>`;
}
