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
SHOWN = '"Paris" 90.5 %; others: "Rome" 13.5 %'


def token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "top_logprobs": [{"token": "Rome", "logprob": -2.0}]}


def event(delta: dict[str, Any], one: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [one]}, "finish_reason": finish}]}


EVENTS = [
    event({"role": "assistant", "content": "Paris"}, token("Paris", -0.1)),
    event({"content": "."}, token(".", -3.0)),
    event({}, token("<end>", 0.0), "stop"),
]
CALL = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLING = [event({"tool_calls": [CALL]}, token("<call>", -0.1), "tool_calls")]


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
        yield tab
        assert [line for line in written if "Failed to load resource" not in line] == []  # of refused requests
        browser.close()


def serve(route: Any) -> None:
    path = urlsplit(route.request.url).path
    file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
    if path == "/page/info":
        route.fulfill(json=INFO)
    elif path == "/v1/models":
        route.fulfill(json={"data": [{"id": "tiny"}, {"id": "an-adapter"}]})
    elif path == "/v1/chat/completions" and "refuse me" in route.request.post_data:
        route.fulfill(status=400, json={"error": {"message": "top_p is 7; it must be in (0, 1]"}})
    elif path == "/v1/chat/completions":
        calls = "call it" in route.request.post_data_json["messages"][-1]["content"]
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in (CALLING if calls else EVENTS)) + "data: [DONE]\n\n"
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


def test_a_server_that_does_not_tell_about_itself_is_named_and_asked_again(page: Any) -> None:
    refusals = [503, None]

    def refuse(route: Any) -> None:
        refusal = refusals.pop(0)
        if refusal is None:
            route.abort()
        else:
            route.fulfill(status=refusal, json={"error": {"message": "the server starts"}})

    page.route("**/page/info", refuse, times=len(refusals))
    page.goto("http://page.test/")
    alert = page.get_by_role("alert")
    playwright.expect(alert).to_have_text("The page cannot begin: the server starts. It tries again.")
    playwright.expect(alert).to_have_text("The page cannot begin: the server does not answer. It tries again.")
    playwright.expect(page.get_by_text("Ask tiny something.")).to_be_visible()


def test_a_chat_is_sent_shown_and_given_as_code(page: Any) -> None:
    page.get_by_label("Model or adapter").select_option("an-adapter")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("seed").fill("7")
    page.get_by_label("Stop strings").fill("END\n")
    body = ask(page, "Where's the tower?")
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where's the tower?"},
    ]
    assert (body["model"], body["seed"], body["stop"], body["stream"]) == ("an-adapter", 7, ["END"], True)
    playwright.expect(page.locator(".content")).to_have_text("Paris.")
    page.locator(".token").first.hover()
    playwright.expect(page.locator(".about-token")).to_have_text(SHOWN)
    page.get_by_label("Question").hover()
    playwright.expect(page.locator(".about-token")).to_have_text("")
    for key in ("End", "ArrowLeft"):
        page.locator(".content").press(key)
    playwright.expect(page.locator(".about-token")).to_have_text(SHOWN)
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


def test_the_result_of_a_call_is_entered_and_sent(page: Any) -> None:
    ask(page, "call it")
    page.get_by_label('Result of weather({"city": "Rome"})').fill("rain")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert sent.value.post_data_json["messages"][-3:] == [
        {"role": "user", "content": "call it"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]
    playwright.expect(page.locator("article").last).to_contain_text("Result: rain")
    playwright.expect(page.locator(".content").last).to_have_text("Paris.")


def test_a_token_that_comes_reads_the_last_tokens_alone(page: Any) -> None:
    """Of 10,000 tokens; whole groups of them stay as they were drawn."""
    num_read = page.evaluate("""async () => {
      const { html, render } = await import("/static/vendor/preact.js");
      const { Answer } = await import("/static/chat.js");
      const { AnswerView } = await import("/static/answer.js");
      let read = 0;
      const token = { get token() { read++; return "a "; }, logprob: -1, top_logprobs: [] };
      const answer = new Answer(), box = document.createElement("div");
      const take = (number) => {
        const logprobs = { content: Array(number).fill(token) };
        answer.take({ delta: { content: "a ".repeat(number) }, logprobs });
      };
      const drawn = async (number) => {
        while (box.querySelectorAll(".token").length < number) await new Promise(requestAnimationFrame);
      };
      take(10000);
      render(html`<${AnswerView} answer=${answer} />`, box);
      await drawn(10000);
      read = 0;
      take(1);
      await drawn(10001);
      render(null, box);
      return read;
    }""")
    assert num_read < 100


def test_a_key_that_the_server_refuses_can_be_replaced_and_the_chat_stays(page: Any) -> None:
    key = ""

    def check(route: Any) -> None:
        if route.request.headers.get("authorization") == f"Bearer {key}":
            return route.fallback()
        return route.fulfill(status=401, json={"error": {"message": "this API key is unknown"}})

    page.route("**/page/info", lambda route: route.fulfill(json=INFO | {"keys": True}), times=1)
    page.route("**/v1/**", check)
    page.goto("http://page.test/?keys")
    for key in ("first", "second"):
        for given in ("wrong", "wrong", key):
            page.get_by_label("An API key").fill(given)
            page.get_by_label("An API key").press("Enter")
            if given == "wrong":
                playwright.expect(page.get_by_role("alert")).to_have_text("this API key is unknown")
        playwright.expect(page.locator(".key")).to_be_hidden()
        ask(page, f"with the {key} key")
        playwright.expect(page.locator("article").last).to_contain_text("Paris.")
        page.get_by_role("button", name="Another key").click()
    page.get_by_role("button", name="keep the key").click()
    playwright.expect(page.locator("article")).to_have_count(2)
    page.unroute("**/v1/**")


def test_axe_finds_no_violation_and_a_small_screen_is_enough(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert axe.Axe().run(page).response["violations"] == []
