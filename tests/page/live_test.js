// What tests/page/test_live.py calls: the live view of one World, or a recording whose chunks the test serves.
import { html, render } from "/static/vendor/preact.js";
import { LiveView, RecordingView } from "/static/live/live.js";
import { World } from "/static/live/world.js";

const app = document.getElementById("app");
window.world = new World();
window.showLive = () => render(html`<${LiveView} state=${window.world} />`, app);
window.showRecording = (info) => render(html`<${RecordingView} info=${info} />`, app);
window.ready = true;
