// The page at /: asks for a key if the server needs one, and shows one of its views, or the recording that is open.
// The key stays in this page's memory.
import { html, render, useEffect, useMemo, useState } from "./vendor/preact.js";
import { checked } from "./chat.js";
import { follow, MAX_WAIT_MS } from "./feed.js";
import { LiveView, RecordingView } from "./live/live.js";
import { World } from "./live/world.js";
import { Learn, Operate } from "./operate.js";
import { Play } from "./play.js";

const THEMES = { "as the system": "light dark", light: "light", dark: "dark" };

function Page({ info }) {
  const world = useMemo(() => new World(), []);
  const [access, setAccess] = useState(info.keys ? null : { key: "" }); // another object for each key that is entered
  const [state, setState] = useState("");
  const [wish, setWish] = useState(null); // for another key: {forPlay, reason}
  const views = { play: "Play", live: "Live", ...(info.learn && { learn: "Learn" }), operate: "Operate" };
  const [view, setView] = useState(viewOf(views));
  useEffect(() => {
    const move = () => setView(viewOf(views));
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const hidden = useHidden();
  const asks = !info.recording && (access === null || wish?.forPlay === (view === "play"));
  const watches = view !== "play" && !asks && !info.recording && !hidden;
  useEffect(() => {
    if (!watches) return setState("");
    setState("connecting");
    const end = new AbortController();
    follow(world, access.key, setState, end.signal).catch(
      ({ message }) => !end.signal.aborted && setWish({ forPlay: false, reason: message }),
    );
    return () => end.abort();
  }, [watches, access]);
  const enter = (event) => {
    event.preventDefault();
    setAccess({ key: event.target.elements.key.value });
    setWish(null);
  };
  const show = () => {
    if (info.recording) return html`<h2>Recording</h2><${RecordingView} info=${info} />`;
    if (asks)
      return html`<form class="key" onSubmit=${enter}>
        <label for="key">${view === "play" ? "An API key" : "An API key with admin"}</label>
        <input id="key" type="password" autocomplete="off" required /><button>show</button>
        ${wish?.reason && html`<p role="alert">${wish.reason}</p>`}
        ${wish && !wish.reason && html`<button type="button" onClick=${() => setWish(null)}>keep the key</button>`}</form>`;
    if (view === "play") return null;
    if (view === "operate") return html`<h2>Operate</h2><${Operate} state=${world} accessKey=${access.key} />`;
    return html`<h2>${views[view]}</h2>
      ${view === "learn" && html`<${Learn} accessKey=${access.key} />`}
      <${LiveView} state=${world} />`;
  };
  const refused = (reason) => setWish({ forPlay: true, reason });
  return html`<header class="page-head"><h1>pagewire</h1>
      ${!info.recording && html`<nav aria-label="Views">${Object.entries(views).map(([name, title]) =>
        html`<a href=${`#${name}`} aria-current=${name === view ? "page" : undefined}>${title}</a>`)}</nav>`}
      <p role="status">${info.recording ? "recording" : state}</p>
      ${access?.key && !asks && html`<button type="button" onClick=${() => setWish({ forPlay: view === "play", reason: "" })}>Another key</button>`}
      <label>Colours <select onChange=${(event) => (document.documentElement.style.colorScheme = THEMES[event.target.value])}>
        ${Object.keys(THEMES).map((name) => html`<option>${name}</option>`)}</select></label></header>
    <main>${show()}
      ${!info.recording && access && html`<div hidden=${view !== "play" || asks}><h2>Play</h2><${Play} access=${access} refused=${refused} /></div>`}
    </main>`; // Play stays there while others are shown, so that its chat is not lost
}

/** Whether the tab is hidden. A hidden one reads no feed. */
function useHidden() {
  const [hidden, setHidden] = useState(document.hidden);
  useEffect(() => {
    const look = () => setHidden(document.hidden);
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
  return hidden;
}

function viewOf(views) {
  const name = location.hash.slice(1);
  return name in views ? name : "play";
}

/** What the page asks first. Until the server tells it, the page says why it does not. */
async function serverInfo() {
  for (let wait = 500; ; wait = Math.min(2 * wait, MAX_WAIT_MS)) {
    try {
      return await (await checked(await fetch("/page/info"))).json();
    } catch (problem) {
      const reason = problem instanceof TypeError ? "the server does not answer" : problem.message;
      render(html`<main><p role="alert" class="problem">The page cannot begin: ${reason}. It tries again.</p></main>`, document.body);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

render(html`<${Page} info=${await serverInfo()} />`, document.body);
