"""Play in a real Chromium, with the answers of a stand-in server: what is sent, shown, and given as code."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no program is named chromium: apt-get install chromium")

STATIC = Path(__file__).parents[2] / "scheduler_service/frontend/http/page/static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
INFO = {"keys": False, "learn": True, "recording": None, "version": "0"}


def token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "top_logprobs": [{"token": "Rome", "logprob": -2.0}]}


def event(delta: dict[str, str], one: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [one]}, "finish_reason": finish}]}


EVENTS = [
    event({"role": "assistant", "content": "Paris"}, token("Paris", -0.1)),
    event({"content": "."}, token(".", -3.0)),
    event({}, token("<end>", 0.0), "stop"),
]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The page at /, which may not write to the console."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": 360, "height": 800}).new_page()
        written: list[str] = []
        tab.on("console", lambda message: written.append(message.text))
        tab.on("pageerror", lambda error: written.append(str(error)))
        tab.route("http://page.test/**", serve)
        tab.goto("http://page.test/")
        yield tab
        assert [line for line in written if "400" not in line] == []  # a browser notes each refused request
        browser.close()


def serve(route: Any) -> None:
    path = urlsplit(route.request.url).path
    file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
    if path == "/page/info":
        route.fulfill(json=INFO)
    elif path == "/v1/models":
        route.fulfill(json={"data": [{"id": "tiny"}]})
    elif path == "/v1/chat/completions" and "refuse me" in route.request.post_data:
        route.fulfill(status=400, json={"error": {"message": "top_p is 7; it must be in (0, 1]"}})
    elif path == "/v1/chat/completions":
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in EVENTS) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")
    elif file.is_file():
        route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix])
    else:
        route.fulfill(status=204)


def ask(page: Any, text: str) -> dict[str, Any]:
    """Ask, and return the body that was sent."""
    page.get_by_label("Question").fill(text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Question").press("Enter")
    found: dict[str, Any] = sent.value.post_data_json
    return found


def test_a_chat_is_sent_shown_and_given_as_code(page: Any) -> None:
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("seed").fill("7")
    page.get_by_label("Stop strings").fill("END\n")
    body = ask(page, "Where's the tower?")
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where's the tower?"},
    ]
    assert (body["model"], body["seed"], body["stop"], body["stream"]) == ("tiny", 7, ["END"], True)
    playwright.expect(page.locator(".content")).to_have_text("Paris.")
    assert page.locator(".token").first.get_attribute("title") == '"Paris" 90.5 %\n"Rome" 13.5 %'
    page.locator(".code summary").click()
    code = page.locator(".code pre").inner_text()
    quoted = code.partition(" -d '")[2].removesuffix("'").replace("'\\''", "'")
    assert json.loads(quoted) == body


def test_the_next_turn_has_the_answer_and_an_error_is_the_servers_sentence(page: Any) -> None:
    body = ask(page, "refuse me")
    assert body["messages"][-2:] == [
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "refuse me"},
    ]
    playwright.expect(page.get_by_role("alert")).to_have_text("top_p is 7; it must be in (0, 1]")


def test_texts_that_are_no_json_are_named_before_anything_is_sent(page: Any) -> None:
    page.get_by_label("Tools, as JSON").fill("[{")
    page.get_by_label("Question").fill("again")
    page.get_by_label("Question").press("Enter")
    playwright.expect(page.get_by_role("alert")).to_contain_text("The tools: ")
    page.get_by_label("Tools, as JSON").fill("")


def test_axe_finds_no_violation_and_a_small_screen_is_enough(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert axe.Axe().run(page).response["violations"] == []
