"""What a chat template may take of time and memory is limited, and a template at a limit delays nothing but chats."""

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from tiny_model import write_byte_tokenizer

from scheduler_service.frontend.limited.limited_process import LimitedProcess, Limits
from scheduler_service.frontend.rendering import chat_renderer
from scheduler_service.frontend.rendering.chat_input import ChatInput, RawMessage
from scheduler_service.frontend.rendering.chat_renderer import ChatRenderer
from scheduler_service.frontend.rendering.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.rendering.template_renderer import MAX_REASON
from scheduler_service.frontend.text.tokenization import Tokenizer

DEADLINE = 60.0
BRANCHES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one call": "{{ 3 ** (messages | length * 99999999) % 7 }}",
    "repeats": "{{ c * 10 ** 10 }}",
    "doubles": "{% set n = namespace(x=c) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "pads": "{{ '%1000000000d' % messages | length }}",
    "fills": "{{ '{:>1000000000}'.format(c) }}",
    "centres": "{{ c | center(10 ** 9) }}",
    "replaces": "{{ (c * 10000).replace('e', c * 10000) }}",
    "calls": "{{ again(c) }}",
    "writes": "{% for a in range(99999) %}{{ c * 1000 }}{% endfor %}",
    "half": "{{ '\\ud800' }}",
    "refuses": "{{ raise_exception(c * 10000) }}",
}
TEMPLATE = (
    "{% macro again(x) %}{{ again(x) }}{% endmacro %}{% set c = messages[0].content %}"
    + "".join(f"{{% {'elif' if n else 'if'} c == '{c}' %}}{code}" for n, (c, code) in enumerate(BRANCHES.items()))
    + "{% else %}{% for m in messages %}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}{% endif %}"
)
"""Does what its first message says."""


async def render(renderer: ChatRenderer, content: str, number: int = 1) -> str:
    async with asyncio.timeout(DEADLINE):
        return (await renderer.render(ChatInput([("user", content, "") for _ in range(number)]), 100_000, 10)).text


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(TEMPLATE, "chat_template.jinja", {"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("loops", r"it takes more than 0\.\d+ s of CPU time to render"),
        ("one call", r"it takes more than 0\.\d+ s of CPU time to render"),
        *((name, "it takes more than 128 MiB of memory to render") for name in list(BRANCHES)[2:8]),
        ("calls", "it is nested too deeply to render"),
    ],
)
async def test_a_template_that_takes_too_much_is_refused_and_the_next_chat_is_rendered(
    content: str, reason: str, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator is told which file has it."""
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.1 if "CPU" in reason else 5.0)
    with capture_logs() as logs, pytest.raises(TemplateError, match=reason) as error:
        await render(renderer, content)
    (line,) = logs
    assert (line["log_level"], line["file"]) == ("error", "chat_template.jinja")
    assert line["reason"] in str(error.value)
    assert await render(renderer, "hi") == "<user>hi</s>"


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 10 }}", "{{ 3 ** 99999999 % 7 }}", "{{" + "[" * 100_000])
async def test_a_template_that_takes_too_much_to_compile_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jinja computes constants when it compiles."""
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.1)
    with pytest.raises(TemplateError, match=r"it (takes more than|is nested too deeply)"):
        await render(ChatRenderer(source, "chat_template.jinja", {}), "hi")


async def test_what_a_template_may_take_grows_with_the_messages(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 0.1 s of CPU time and 24 MB, much more than a process may take for no messages here."""
    assert await render(renderer, "hi")
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.01)
    monkeypatch.setattr(chat_renderer, "SECONDS_OF_TEMPLATE", 0.0)
    monkeypatch.setattr(chat_renderer, "MEMORY", 16 << 20)
    assert await render(renderer, "hi, " * 10, 20_000) == ("<user>" + "hi, " * 10 + "</s>") * 20_000


async def test_a_template_writes_no_more_than_the_context_holds(renderer: ChatRenderer) -> None:
    with pytest.raises(TooManyTokensError):
        await render(renderer, "writes")


async def test_what_a_template_says_is_text_and_short(renderer: ChatRenderer) -> None:
    with pytest.raises(TemplateError, match="surrogate"):
        await render(renderer, "half")
    with pytest.raises(TemplateError, match=r"refuses these messages: (refuses)+") as error:
        await render(renderer, "refuses")
    assert len(str(error.value)) == MAX_REASON + 1


async def test_a_chat_is_rendered_by_another_process_when_one_is_killed(renderer: ChatRenderer) -> None:
    before = set(psutil.Process().children())
    renderer = ChatRenderer(TEMPLATE, "chat_template.jinja", {"eos_token": "</s>"})
    for number in range(2):
        assert await render(renderer, "hi") == "<user>hi</s>"
        (process,) = set(psutil.Process().children()) - before
        (fork,) = process.children()
        (process, fork)[number].kill()
        await asyncio.to_thread(fork.wait, DEADLINE)
    assert await render(renderer, "hi") == "<user>hi</s>"


async def test_texts_do_not_wait_for_chats_whose_template_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.1)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(BRANCHES["loops"])
    tokenizer = Tokenizer(tmp_path)
    async with asyncio.timeout(DEADLINE):
        chats = [
            asyncio.create_task(tokenizer.encode_chat(ChatInput([("user", "a", "")]), aside=aside))
            for aside in (False, False, False, True)
        ]
        await asyncio.sleep(0)
        assert await tokenizer.encode("a")
        assert await tokenizer.decode([70], skip_special_tokens=True)
        assert not any(chat.done() for chat in chats)
        errors = await asyncio.gather(*chats, return_exceptions=True)
    assert [type(error) for error in errors] == [TemplateError] * 4


class Messages(list[RawMessage]):
    """A list that can be referred to weakly."""


async def test_nothing_is_left_of_a_chat_that_is_cancelled_while_it_waits(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, may_go_on = threading.Semaphore(0), threading.Event()
    ask = LimitedProcess.ask

    def waiting(process: LimitedProcess, message: bytes, limits: Limits) -> bytes:
        came.release()
        assert may_go_on.wait(DEADLINE)
        return ask(process, message, limits)

    monkeypatch.setattr(LimitedProcess, "ask", waiting)
    rendering = [asyncio.create_task(render(renderer, "hi")) for _ in range(chat_renderer.NUM_RENDERERS)]
    for _ in rendering:
        assert await asyncio.to_thread(came.acquire, timeout=DEADLINE)
    messages = Messages([("user", "hi", "")])
    left = weakref.ref(messages)
    cancelled = asyncio.create_task(renderer.render(ChatInput(messages), 100, 100))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    del messages, cancelled
    gc.collect()
    assert left() is None
    may_go_on.set()
    assert await asyncio.gather(*rendering) == ["<user>hi</s>"] * len(rendering)
