"""The live view in a real Chromium: what it shows of frames. docs/page.md describes the frames.

The tests need Debian's chromium and the packages playwright and axe-playwright-python, which nothing else needs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from live_frames import CHUNKS, NEXT, SNAPSHOT, WORKER, Frame

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no program is named chromium: apt-get install chromium")

HERE = Path(__file__).parent
STATIC = HERE.parents[1] / "scheduler_service/frontend/http/page/static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

FULL = "64 pages show this server's work already"
FEED: list[Frame | str | None] = [SNAPSHOT]
"""What the next connections get; None: no answer; a text: an error of the server. The last one stays."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The one tab of these tests: a new one takes a second."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.route("http://page.test/**", serve)
    return context.new_page()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """An empty page, which may not write to the console."""
    written: list[str] = []
    tab.on("console", lambda message: written.append(message.text))
    tab.on("pageerror", lambda error: written.append(str(error)))
    tab.goto("http://page.test/live.html")
    tab.wait_for_function("window.ready")
    yield tab
    assert written == []


def serve(route: Any) -> None:
    url = urlsplit(route.request.url)
    if url.path == "/page/recording":
        step = int(parse_qs(url.query)["from"][0])
        route.fulfill(json=next(chunk for chunk in reversed(CHUNKS) if chunk["from"] <= step))
        return
    if url.path == "/page/info":
        route.fulfill(json={"keys": True, "learn": False, "recording": None, "version": "0"})
        return
    if url.path == "/page/feed":  # one frame, and the stream ends
        is_admin = route.request.headers.get("authorization") == "Bearer secret"
        snapshot = FEED.pop(0) if is_admin and len(FEED) > 1 else FEED[0]
        if snapshot is None:
            route.abort()
        elif isinstance(snapshot, str):
            route.fulfill(status=503, json={"error": {"message": snapshot}})
        else:
            route.fulfill(status=200 if is_admin else 403, body=f"data: {json.dumps(snapshot)}\n\n")
        return
    file = STATIC / url.path.removeprefix("/static/") if url.path.startswith("/static/") else HERE / url.path[1:]
    file = STATIC / "index.html" if url.path == "/" else file
    if file.is_file():
        headers = {"Content-Security-Policy": POLICY}
        route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix], headers=headers)
    else:
        route.fulfill(status=204)  # favicon.ico


def show(page: Any, *frames: Frame) -> None:
    page.evaluate("showLive()")
    apply(page, *frames)


def apply(page: Any, *frames: Frame) -> None:
    page.evaluate("frames => frames.forEach((frame) => world.apply(frame))", list(frames))


def has_text(page: Any, selector: str, text: str) -> None:
    playwright.expect(page.locator(selector).first).to_contain_text(text)


LIT = """([label, name]) => {
  const canvas = document.querySelector(`canvas[aria-label="${label}"]`);
  const map = {columns: canvas.dataset.columns, size: canvas.dataset.size};
  const colour = getComputedStyle(document.querySelector(`.live-maps .swatch-${name}`)).backgroundColor.match(/\\d+/g);
  const context = canvas.getContext("2d"), found = [];
  for (let block = 0; block <= canvas.ariaValueMax; block++) {
    const x = (block % map.columns) * map.size, y = Math.floor(block / map.columns) * map.size;
    const pixel = context.getImageData(x, y, 1, 1).data;
    if (colour.every((part, i) => Number(part) === pixel[i])) found.push(block);
  }
  return found;
}"""
"""The blocks of a map that are drawn in the colour of a swatch."""


def drawn(page: Any, name: str, expected: list[int], pool: str = "device") -> None:
    """Wait until the blocks in the colour of a swatch are these."""
    label = f"Blocks of the {pool} pool of worker w1"
    page.wait_for_selector(f'canvas[aria-label="{label}"][data-columns]')
    for _ in range(100):
        if (found := page.evaluate(LIT, [label, name])) == expected:
            return
        page.evaluate("() => new Promise(requestAnimationFrame)")
    assert found == expected


def test_frames_give_the_counts_shown(page: Any) -> None:
    show(page, SNAPSHOT)
    has_text(page, ".pool .counts", "40 blocks: 34 free, 3 held, 1 shared, 2 cached")
    has_text(page, ".worker", "serving")
    has_text(page, ".live-queue", "it needs 7 blocks, and 3 are free")
    has_text(page, ".live-events", "its blocks were swapped to the host")
    apply(page, {"at": 2.1, "blocks": {"w1": {"device": [[2, "001"]]}}, "requests": {"sharing": None, "head": None}})
    has_text(page, ".pool .counts", "40 blocks: 35 free, 3 held, 2 cached")
    names = page.locator(".live-requests .name")
    playwright.expect(names).to_have_text(["running", "swapped", "behind"])
    drawn(page, "held", [0, 1, 4])
    drawn(page, "swapped", [5, 6], pool="host")


def test_a_requests_blocks_light_up_and_a_block_names_its_requests(page: Any) -> None:
    show(page, SNAPSHOT)
    page.get_by_role("button", name="running", exact=True).hover()
    drawn(page, "lit", [0, 1, 3])
    page.get_by_role("button", name="swapped", exact=True).focus()
    page.mouse.move(0, 0)
    drawn(page, "lit", [])
    canvas = page.get_by_role("slider", name="Blocks of the device pool of worker w1")
    canvas.press("Home")
    for _ in range(3):
        canvas.press("ArrowRight")
    playwright.expect(canvas).to_have_attribute("aria-valuetext", "block 3: shared by running, sharing")
    drawn(page, "lit", [0, 1, 2, 3])


def test_maps_follow_the_colour_scheme_without_a_frame(page: Any) -> None:
    show(page, SNAPSHOT)
    drawn(page, "swapped", [5, 6], pool="host")
    page.emulate_media(color_scheme="dark")
    drawn(page, "swapped", [5, 6], pool="host")
    page.evaluate("() => { document.documentElement.style.colorScheme = 'light'; }")
    drawn(page, "swapped", [5, 6], pool="host")
    page.emulate_media(color_scheme="light")


def test_a_lost_worker_has_no_pool_and_its_requests_move(page: Any) -> None:
    show(page, SNAPSHOT)
    page.get_by_role("button", name="running", exact=True).click()
    gone = {"state": "lost", "device_blocks": 0, "host_blocks": 0, "losses": 1, "error": "its connection was closed"}
    moved = {"state": "waiting", "worker": None, "moves": 1, "tables": {"0": [0, []]}}
    apply(page, {"at": 3.0, "workers": {"w1": gone}, "requests": {"running": moved}})
    apply(page, {"at": 4.0, "workers": {"w2": WORKER}, "requests": {"running": {"state": "prefill", "worker": "w2"}}})
    has_text(page, ".worker.ill", "its connection was closed")
    has_text(page, ".live-life ol", "moving")
    has_text(page, ".live-life ol", "prefill on w2")
    playwright.expect(page.locator(".live-requests tbody tr", has_text="w2").locator("td").last).to_have_text("")
    has_text(page, ".worker-maps", "No pool")


def test_a_pool_of_100_000_blocks_is_drawn_where_it_changed(page: Any) -> None:
    """The limit of a frame is 5 ms; the median counts, because other programs share the machine."""
    show(page)
    median, cells = page.evaluate("""async () => {
      const { Cells } = await import("/static/live/block_map.js");
      const states = new Uint8Array(100000), colours = [1, 2, 3, 4, 5].map((one) => `rgb(${one}, 0, 0)`), times = [];
      const map = new Cells(document.createElement("canvas"), states.length, 1200, 1);
      map.draw(states, [], colours);
      let cells = 0;
      for (let frame = 0; frame < 21; frame++) {
        for (let i = 0; i < 2000; i++) states[(frame + i * 37) % 100000] = (frame % 3) + 1;
        const start = performance.now();
        cells = map.draw(states, [], colours);
        times.push(performance.now() - start);
      }
      return [times.sort((one, two) => one - two)[10], cells];
    }""")
    assert cells == 2000
    assert median < 5


def test_bars_and_samples_are_bounded(page: Any) -> None:
    """Three hours of short requests."""
    numbers = page.evaluate(
        """async (snapshot) => {
      const { historyOf } = await import("/static/live/history.js");
      world.apply(snapshot);
      const history = historyOf(world);
      for (let at = 3; at < 10000; at += 2) {
        const id = `r${at}`, request = { ...snapshot.requests.running, arrived: at };
        world.apply({ at, requests: { [id]: request }, events: [{ at, text: "" }] });
        world.apply({ at: at + 1, requests: { [id]: null }, ended: [{ id, at, status: "stopped" }] });
      }
      const { ended, samples, latencies, lanes } = history;
      return [ended, samples, latencies, lanes, world.events].map((list) => list.length);
    }""",
        SNAPSHOT,
    )
    assert max(numbers) <= 601


def test_a_step_of_a_recording_is_its_frames_applied_up_to_it(page: Any) -> None:
    info = {"recording": {"name": "a run", "num_steps": 30, "first_at": 0.0, "last_at": 2.9}}
    page.evaluate("info => showRecording(info)", info)
    slider = page.get_by_role("slider", name="step")
    for step in (13, 30, 30, 4, 5, 1):
        slider.fill(str(step))
        has_text(page, ".decisions", f"decision of step {step}")
        drawn(page, "held", list(range(step)))
    page.get_by_role("button", name="one step on").press("ArrowRight")
    has_text(page, ".decisions", "decision of step 2")
    playwright.expect(page.get_by_role("alert")).to_have_count(0)


def test_axe_finds_no_violation(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    show(page, SNAPSHOT, {"at": 3.0, "requests": {"running": {"output_tokens": 9}}})
    page.get_by_role("button", name="running", exact=True).click()
    has_text(page, ".live-life", "9 tokens")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == []


def test_the_page_asks_for_a_key_and_connects_again(tab: Any) -> None:
    tab.goto("http://page.test/#live")
    key = tab.get_by_label("An API key with admin")
    key.fill("wrong")
    key.press("Enter")
    playwright.expect(tab.get_by_role("alert")).to_have_text("The server refuses this key: it must be one with admin.")
    key.fill("secret")
    key.press("Enter")
    has_text(tab, ".pool .counts", "40 blocks")
    status = tab.get_by_role("status")
    playwright.expect(status).to_have_text("Not connected: the server ended the feed. What is shown is old.")
    with tab.expect_request("**/page/feed"):
        pass


def test_the_engine_that_follows_a_lost_one_is_shown_and_nothing_of_the_old(tab: Any) -> None:
    """Of the same server, of one whose process was lost in between, and of one that has no room for a while."""
    for feed, reason in (([NEXT], ""), ([None, NEXT], "the server does not answer"), ([FULL, NEXT], FULL)):
        FEED[:] = [SNAPSHOT]
        has_text(tab, ".live-requests h3", "Requests 5")
        FEED[:] = feed
        if reason:
            status = tab.get_by_role("status")
            playwright.expect(status).to_have_text(f"Not connected: {reason}. What is shown is old.")
        has_text(tab, ".live-requests h3", "Requests 0")
        has_text(tab, ".pool .counts", "40 blocks: 40 free")
        has_text(tab, ".live-events", "Nothing has happened yet.")
    FEED[:] = [SNAPSHOT]


def test_a_hidden_tab_reads_no_feed(tab: Any) -> None:
    hide = """hidden => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    status = tab.locator(".page-head [role=status]")
    tab.evaluate(hide, True)
    playwright.expect(status).to_have_text("")
    with tab.expect_request("**/page/feed"):
        tab.evaluate(hide, False)
    playwright.expect(status).not_to_have_text("")
