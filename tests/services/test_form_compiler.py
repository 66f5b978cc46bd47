"""Forms are compiled once, by processes that end when a form is too much for them, or when they are killed."""

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.child_process import start_child
from scheduler_service.frontend.forms import forms as forms_module
from scheduler_service.frontend.forms.form_compiler import compile_form
from scheduler_service.frontend.forms.forms import FormError, Forms
from scheduler_service.frontend.limited import limited_process
from scheduler_service.frontend.limited.limited_process import LimitedProcess, Limits

BOMB = json.dumps({"type": "string", "allOf": [{"pattern": f"[a-z]*{number}[0-9]*"} for number in range(24)]})
"""Every pattern doubles what it takes."""
DEADLINE = 60.0


def regex(text: str) -> pb.SamplingParams:
    return pb.SamplingParams(regex=text)


Compilers = Callable[[], list[psutil.Process]]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """Those that this test has started and that run, each before what it has forked.

    Others of this process may come and go: a front end of a test before still ends its last form.
    """
    started: list[psutil.Process] = []

    def noting(module: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        process, control = start_child(module)
        started.append(psutil.Process(process.pid))
        return process, control

    monkeypatch.setattr(limited_process, "start_child", noting)
    return lambda: [
        process
        for template in started
        if runs(template)
        for process in (template, *template.children())
        if runs(process)
    ]


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def forms(own: Compilers) -> Iterator[Forms]:
    forms = Forms()
    yield forms
    forms._compilers._threads.shutdown()
    found = own()
    for compiler in forms._compilers._idle:
        compiler.close()
    end = time.monotonic() + DEADLINE
    while any(map(runs, found)):  # what was forked is killed by the system a moment later
        assert time.monotonic() < end, found


class Asked:
    """What compilers were asked. One that is asked for a form with `wait` in it waits for `may_go_on`."""

    def __init__(self) -> None:
        self.forms: list[bytes] = []
        self.may_go_on = threading.Event()
        self._came = threading.Semaphore(0)

    def note(self, form: bytes) -> None:
        self.forms.append(form)
        self._came.release()
        assert b"wait" not in form or self.may_go_on.wait(DEADLINE)

    async def one_more(self) -> None:
        """Return when a compiler is asked, once for each time."""
        assert await asyncio.to_thread(self._came.acquire, timeout=DEADLINE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked, ask = Asked(), LimitedProcess.ask

    def noting(compiler: LimitedProcess, form: bytes, limits: Limits) -> bytes:
        asked.note(form)
        return ask(compiler, form, limits)

    monkeypatch.setattr(LimitedProcess, "ask", noting)
    return asked


async def test_grammars_that_were_used_lately_are_kept_and_so_are_reasons(
    forms: Forms, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms_module, "MAX_KEPT_BYTES", 1000)
    first = await forms.read(regex("a"))
    assert await forms.read(regex("a")) is first
    for _ in range(2):
        with pytest.raises(FormError, match="unclosed group"):
            await forms.read(regex("(a"))
    assert len(asked.forms) == 2
    for number in range(100):
        await forms.read(regex(f"b{number}"))
    kept = forms._grammars.values()
    assert forms._num_bytes == sum(len(grammar) + len(error) for grammar, error, _ in kept) <= 1000
    assert await forms.read(regex("a")) is not first


async def test_a_refusal_is_kept_for_a_while_only(forms: Forms, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a form takes too long depends on the machine, too; a grammar that was found does not."""
    monkeypatch.setattr(forms_module, "REFUSAL_SECONDS", 0.0)
    for text in ("(a", "(a", "b", "b"):
        with contextlib.suppress(FormError):
            await forms.read(regex(text))
    assert len(asked.forms) == 3
    assert forms._num_bytes == sum(len(grammar) + len(error) for grammar, error, _ in forms._grammars.values())


async def test_requests_that_bring_a_form_at_the_same_time_have_it_compiled_once(forms: Forms, asked: Asked) -> None:
    grammars = await asyncio.gather(*(forms.read(regex("ab")) for _ in range(4)))
    assert len(set(grammars)) == len(asked.forms) == 1
    refused = await asyncio.gather(*(forms.read(regex("(ab")) for _ in range(4)), return_exceptions=True)
    assert all(isinstance(error, FormError) for error in refused)
    assert len(asked.forms) == 2


async def test_the_others_have_their_form_when_the_client_that_came_first_leaves(forms: Forms, asked: Asked) -> None:
    reading = [asyncio.create_task(forms.read(regex("ab"))) for _ in range(3)]
    await asked.one_more()
    reading[0].cancel()
    assert all(await asyncio.gather(*reading[1:]))


async def test_a_form_waits_for_no_other_one_and_is_not_compiled_when_its_client_has_left(
    forms: Forms, asked: Asked
) -> None:
    first = asyncio.create_task(forms.read(regex("wait")))
    await asked.one_more()
    assert await forms.read(regex("a"))
    await asked.one_more()
    waiting = [asyncio.create_task(forms.read(regex(f"{number} wait"))) for number in range(5)]
    await asked.one_more()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    asked.may_go_on.set()
    assert await first
    assert await forms.read(regex("b"))
    assert len(asked.forms) == 4


async def test_a_form_that_takes_too_long_is_refused_and_the_process_that_replaces_its_own_is_there(
    forms: Forms, own: Compilers
) -> None:
    await forms.read(regex("a"))
    template, child = own()
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(FormError, match=r"json_schema cannot be followed: it takes more than 0.3 s of CPU time"):
            await forms.read(pb.SamplingParams(json_schema=BOMB))
    assert await forms.read(regex("b"))
    assert not child.is_running()
    assert own()[0] == template


async def test_a_form_that_takes_too_much_memory_is_refused(
    forms: Forms, own: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has 4 MiB here, because nothing was found that takes 256 in its time."""
    await forms.read(regex("a"))
    most = own()[-1].memory_info().data + (4 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(forms_module, "MAX_MEMORY", most)
        with pytest.raises(FormError, match=rf"it takes more than {most >> 20} MiB of memory to compile"):
            await forms.read(regex(r"(?i)\p{L}" * 5000))
    assert await forms.read(regex("b"))


async def test_a_process_that_has_held_much_memory_gives_it_back(forms: Forms, own: Compilers) -> None:
    await forms.read(regex("a"))
    child = own()[-1]
    assert await forms.read(regex(r"(?i)" + r"\p{L}" * 700))  # 20 MiB of it
    assert await forms.read(regex("b"))
    assert not child.is_running()


@pytest.mark.parametrize("end", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "stopped"])
@pytest.mark.parametrize("number", [-1, -2], ids=["the one that compiles", "the one that it was forked from"])
async def test_a_form_is_compiled_by_another_process_when_one_is_ended(
    forms: Forms,
    own: Compilers,
    end: Callable[[psutil.Process], None],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if end is psutil.Process.suspend:
        monkeypatch.setattr(limited_process, "DEAF_SECONDS", 1)
    await forms.read(regex("a"))
    end(own()[number])
    async with asyncio.timeout(DEADLINE):
        assert await forms.read(regex("b"))


async def test_where_processes_are_killed_again_and_again_the_request_may_be_tried_later(
    forms: Forms, own: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LimitedProcess._start

    def killed(compiler: LimitedProcess) -> object:
        connection = start(compiler)
        own()[-1].kill()
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(LimitedProcess, "_start", killed)
        with pytest.raises(RequestError, match="was killed or did not answer; try again") as error:
            await forms.read(regex("a"))
    assert error.value.code is grpc.StatusCode.UNAVAILABLE
    assert await forms.read(regex("a"))


@pytest.mark.parametrize("text", ['start: <|endoftext|> "a"', 'start: "a" <[7]>', 'start: <[500000-500001]> "a"'])
def test_tokens_that_a_grammar_names_are_left_to_the_worker(text: str) -> None:
    grammar, error = compile_form("grammar", [text])
    assert grammar
    assert not error
