// The page at /: asks for a key if the server needs one, and shows one of its views, or the recording that is open.
// The key stays in this page's memory.
import { html, render, useEffect, useMemo, useState } from "./vendor/preact.js";
import { follow } from "./feed.js";
import { LiveView, RecordingView } from "./live/live.js";
import { World } from "./live/world.js";
import { Learn, Operate } from "./operate.js";
import { Play } from "./play.js";

const THEMES = { "as the system": "light dark", light: "light", dark: "dark" };

function Page({ info }) {
  const world = useMemo(() => new World(), []);
  const [key, setKey] = useState(info.keys ? null : "");
  const [state, setState] = useState("");
  const [refusal, setRefusal] = useState("");
  const views = { play: "Play", live: "Live", ...(info.learn && { learn: "Learn" }), operate: "Operate" };
  const [view, setView] = useState(viewOf(views));
  useEffect(() => {
    const move = () => setView(viewOf(views));
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const watches = view !== "play" && key !== null && !info.recording;
  useEffect(() => {
    setRefusal("");
    if (!watches) return setState("");
    setState("connecting");
    const end = new AbortController();
    follow(world, key, setState, end.signal).catch((problem) => !end.signal.aborted && setRefusal(problem.message));
    return () => end.abort();
  }, [watches, key]);
  const enter = (event) => {
    event.preventDefault();
    setKey(event.target.elements.key.value);
  };
  const show = () => {
    if (info.recording) return html`<h2>Recording</h2><${RecordingView} info=${info} />`;
    if (key === null || (refusal && watches))
      return html`<form class="key" onSubmit=${enter}>
        <label for="key">${view === "play" ? "An API key" : "An API key with admin"}</label>
        <input id="key" type="password" autocomplete="off" required /><button>show</button>
        ${refusal && html`<p role="alert">${refusal}</p>`}</form>`;
    if (view === "play") return null;
    if (view === "operate") return html`<h2>Operate</h2><${Operate} state=${world} accessKey=${key} />`;
    return html`<h2>${views[view]}</h2>
      ${view === "learn" && html`<${Learn} accessKey=${key} />`}
      <${LiveView} state=${world} />`;
  };
  return html`<header class="page-head"><h1>pagewire</h1>
      ${!info.recording && html`<nav aria-label="Views">${Object.entries(views).map(([name, title]) =>
        html`<a href=${`#${name}`} aria-current=${name === view ? "page" : undefined}>${title}</a>`)}</nav>`}
      <p role="status">${info.recording ? "recording" : state}</p>
      <label>Colours <select onChange=${(event) => (document.documentElement.style.colorScheme = THEMES[event.target.value])}>
        ${Object.keys(THEMES).map((name) => html`<option>${name}</option>`)}</select></label></header>
    <main>${show()}
      ${!info.recording && key !== null && html`<div hidden=${view !== "play"}><h2>Play</h2><${Play} accessKey=${key} /></div>`}
    </main>`; // Play stays there while others are shown, so that its chat is not lost
}

function viewOf(views) {
  const name = location.hash.slice(1);
  return name in views ? name : "play";
}

const answer = await fetch("/page/info");
render(html`<${Page} info=${await answer.json()} />`, document.body);
