// The page at /: asks for a key if the server needs one, and shows the live view or the recording that is open.
// The key stays in this page's memory.
import { html, render, useEffect, useMemo, useState } from "./vendor/preact.js";
import { follow } from "./feed.js";
import { LiveView, RecordingView } from "./live/live.js";
import { World } from "./live/world.js";

function Page({ info }) {
  const world = useMemo(() => new World(), []);
  const [key, setKey] = useState(info.keys ? null : "");
  const [state, setState] = useState("connecting");
  const [refusal, setRefusal] = useState("");
  useEffect(() => {
    if (key === null || info.recording) return undefined;
    const end = new AbortController();
    follow(world, key, setState, end.signal).catch((problem) => (setRefusal(problem.message), setKey(null)));
    return () => end.abort();
  }, [key]);
  const enter = (event) => {
    event.preventDefault();
    setRefusal("");
    setKey(event.target.elements.key.value);
  };
  return html`<header class="page-head"><h1>pagewire</h1>
      <p role="status">${info.recording ? "recording" : key === null ? "" : state}</p></header>
    <main>
      ${
        info.recording
          ? html`<h2>Recording</h2><${RecordingView} info=${info} />`
          : key === null
            ? html`<form class="key" onSubmit=${enter}><label for="key">An API key with admin</label>
              <input id="key" type="password" autocomplete="off" required /><button>show</button>
              ${refusal && html`<p role="alert">${refusal}</p>`}</form>`
            : html`<h2>Live</h2><${LiveView} state=${world} />`
      }
    </main>`;
}

const answer = await fetch("/page/info");
render(html`<${Page} info=${await answer.json()} />`, document.body);
