"""What a form costs ends its own output and no other, and is not counted twice where an output is read anew."""

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tiny_model import write_byte_tokenizer
from tokenizers import Tokenizer
from worker_helpers import state

from worker_service.execution.sampling import form_progress, form_turns
from worker_service.execution.sampling import forms as forms_module
from worker_service.execution.sampling.forms import Forms
from worker_service.session.sequence_state import ScheduledChunk, SequenceState

END, VOCABULARY = 2, 259
LIST = LLMatcher.grammar_from_lark('start: l\nl: i | i "," l\ni: /[0-9]/')
"""Of which the library takes 0.25 s to read 3,500 tokens: for each it looks at all before."""
LIMITED = LLMatcher.grammar_from_lark(
    "start: l0\ni: /[0-9]/\n"
    + "".join(f"l{one}: i" + "".join(f' | i "," l{other}' for other in range(8)) + "\n" for one in range(8))
)
"""Of which the library's limit is reached after 62 tokens, in 0.24 s."""
CHOICE = LLMatcher.grammar_from_regex("yyyyy|zz")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture
def forms(shared_forms: Forms) -> Iterator[Forms]:
    """Without what it remembers."""
    yield shared_forms
    shared_forms._bans.clear()


@pytest.fixture(scope="module")
def shared_forms(directory: Path) -> Iterator[Forms]:
    found = Forms.load(sorted(directory.iterdir()), VOCABULARY)
    assert found is not None
    assert found.is_ready()
    yield found
    found.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form may take little for a token: less than for all tokens of an output together."""
    monkeypatch.setattr(forms_module, "MAX_SECONDS", 0.1)


@pytest.fixture
def slow(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the process seem to take too long for an answer, after so many others."""

    def seem_slow(number: int) -> None:
        receive, answers = forms._receive, itertools.count()

        def received(reader: Connection) -> bytes:
            if next(answers) == number:
                raise TimeoutError("it takes too long")
            return receive(reader)

        monkeypatch.setattr(forms, "_receive", received)

    return seem_slow


def written(tokenizer: Tokenizer, text: str, number: int, form: str, owner: bytes = b"") -> SequenceState:
    """A sequence that is new to the worker, and has written this."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    one = state([5, 6], sequence_id=number, form=form, form_owner=owner)
    one.token_ids.extend(token_ids)
    return one


def followers(forms: Forms, tokenizer: Tokenizer, alive: Sequence[SequenceState]) -> list[str | None]:
    """What a step finds: the characters that may follow each, "." for the end; None of one that is late."""
    masks = forms.begin(
        [ScheduledChunk(one, len(one.token_ids) - 1, len(one.token_ids), samples=True) for one in alive]
    )
    late = masks.late()
    found = []
    for one, mask in zip(alive, masks.of(alive), strict=True):
        may = [token_id for token_id in range(VOCABULARY) if mask[token_id // 8] >> token_id % 8 & 1]
        text = "".join(sorted("." if token_id == END else tokenizer.decode([token_id]) for token_id in may))
        found.append(None if one.sequence_id in late else text)
    return found


def until_read(forms: Forms, tokenizer: Tokenizer, one: SequenceState) -> tuple[str, int]:
    """What may follow once it is read, and after how many steps."""
    for number in range(200):
        (found,) = followers(forms, tokenizer, [one])
        if found is not None:
            return found, number
    raise AssertionError("it is not read")


@pytest.mark.usefixtures("hurried")
def test_a_long_output_is_read_anew_in_slices_beside_the_masks_of_others(forms: Forms, tokenizer: Tokenizer) -> None:
    """As after a preemption, the loss of a worker, or a break: it goes on, and its form is followed for all."""
    other = written(tokenizer, "1,", 1, LIST)
    for number in range(2, 4):  # once more elsewhere
        long, num_late = written(tokenizer, "1," * 1_600, number, LIST), 0
        while (found := followers(forms, tokenizer, [long, other]))[0] is None:
            assert found[1] == "0123456789"
            num_late += 1
            assert num_late < 500
        assert found == ["0123456789"] * 2
        assert num_late > 1
        long.token_ids.append(tokenizer.token_to_id("7"))
        assert followers(forms, tokenizer, [long]) == [",."]
    fresh = state([5], sequence_id=50, form=LIST, form_owner=b"another")
    assert followers(forms, tokenizer, [fresh]) == ["0123456789"]


@pytest.mark.usefixtures("hurried")
def test_where_the_process_is_killed_all_others_are_read_anew_and_go_on(
    forms: Forms, tokenizer: Tokenizer, slow: Callable[[int], None]
) -> None:
    long, other = written(tokenizer, "1," * 1_600, 1, LIST), state([5], sequence_id=2, form=CHOICE)
    assert until_read(forms, tokenizer, long)[0] == "0123456789"
    assert followers(forms, tokenizer, [other]) == ["yz"]
    process = forms._process
    slow(0)
    assert followers(forms, tokenizer, [other, long]) == ["", None]
    assert forms._process is not process
    assert until_read(forms, tokenizer, long)[0] == "0123456789"


@pytest.mark.usefixtures("hurried")
def test_an_output_that_reaches_the_librarys_limit_ends_alone(forms: Forms, tokenizer: Tokenizer) -> None:
    """It is read anew by a matcher of its own before it ends; no other output's form is judged by that."""
    far, near = written(tokenizer, "1," * 30, 1, LIMITED), written(tokenizer, "1," * 3, 2, LIMITED)
    while (found := until_read(forms, tokenizer, far)[0]) and len(far.token_ids) < 80:
        far.token_ids.append(tokenizer.token_to_id("1" if "1" in found else ","))
    assert not found
    for one in (near, state([5], sequence_id=3, form=LIMITED), written(tokenizer, "1," * 29, 4, LIMITED)):
        assert until_read(forms, tokenizer, one)[0] == "0123456789"


@pytest.mark.usefixtures("hurried")
def test_a_form_that_is_slow_is_not_begun_again_for_its_owner_for_a_while(
    forms: Forms, tokenizer: Tokenizer, slow: Callable[[int], None]
) -> None:
    """Another owner's outputs, and outputs that have begun, are followed as far as they can be."""
    number = iter(range(1, 100))

    def new(text: str = "", owner: bytes = b"its owner") -> SequenceState:
        return written(tokenizer, text, next(number), CHOICE, owner)

    begun, other = new("y"), new("yy", b"another")
    slow(2)
    assert followers(forms, tokenizer, [begun, other, new("z")]) == ["y", "y", ""]
    assert followers(forms, tokenizer, [begun]) == ["y"]
    process = forms._process
    alive = [new(), begun, other, new(owner=b"another"), new("yy")]
    assert followers(forms, tokenizer, alive) == ["", "y", "y", "yz", "y"]
    assert forms._process is process
    for ban, (until, times) in forms._bans.items():
        assert until - time.monotonic() <= forms_module.BAN_SECONDS
        forms._bans[ban] = time.monotonic(), times  # it is over
    assert followers(forms, tokenizer, [new()]) == ["yz"]


@pytest.mark.usefixtures("hurried")
def test_after_the_second_time_outputs_that_have_begun_end_too_in_the_same_step(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many outputs of one slow form in a step take no longer than two; those of another owner go on."""
    receive, num_slow = forms._receive, itertools.count()

    def received(reader: Connection) -> bytes:
        if next(num_slow) in (1, 2):
            raise TimeoutError("it takes too long")
        return receive(reader)

    monkeypatch.setattr(forms, "_receive", received)
    alive = [written(tokenizer, "y", 7, CHOICE, b"another")]
    alive += [written(tokenizer, "y", number, CHOICE, b"its owner") for number in range(1, 7)]
    assert followers(forms, tokenizer, alive) == ["y"] + [""] * 6
    assert next(num_slow) == 3


def test_forms_that_are_slow_together_are_found_out_in_several_steps(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long as it may before it is ended; 60 of them in one step took 20 s."""
    slow = [LLMatcher.grammar_from_regex(f"yyyyy|slow{number}") for number in range(8)]
    send, receive, sent, num_slow = forms._send, forms._receive, deque[str](), itertools.count()

    def noted(reader: Connection, items: Sequence[Any]) -> None:
        send(reader, items)
        sent.clear()
        sent.extend(item.form for item in items)

    def received(reader: Connection) -> bytes:
        if "slow" in sent.popleft():
            next(num_slow)
            raise TimeoutError("it takes too long")
        return receive(reader)

    monkeypatch.setattr(forms, "_send", noted)
    monkeypatch.setattr(forms, "_receive", received)
    other = written(tokenizer, "y", 20, CHOICE, b"another")
    alive = [written(tokenizer, "y", number, form, b"its owner") for number, form in enumerate(slow, 1)]
    for ended in (3, 6, 8):
        found = followers(forms, tokenizer, [*alive, other])
        assert found[-1] in ("y", None)
        assert found[:-1].count("") == ended
        assert found[:-1].count(None) == len(slow) - ended
    assert next(num_slow) == len(slow)


def test_forms_that_come_together_are_compiled_in_several_steps(forms: Forms, tokenizer: Tokenizer) -> None:
    """What each takes to compile is more than a slice, so that masks of others wait for one of them in a step."""
    large = [LLMatcher.grammar_from_regex(r"(?i)\p{L}" * 300 + str(number)) for number in range(4)]
    alive = [state([5], sequence_id=number, form=form) for number, form in enumerate(large, 1)]
    running = state([5], sequence_id=9, form=CHOICE)
    assert until_read(forms, tokenizer, running)[0] == "yz"
    num_ready = [0]
    while num_ready[-1] < len(alive):
        found = followers(forms, tokenizer, [*alive, running])
        assert found[-1] == "yz"
        num_ready.append(sum(one is not None for one in found[:-1]))
    assert {*num_ready} == {0, 1, 2, 3, 4}


def test_forms_of_one_owner_are_not_waited_for_by_anothers(forms: Forms, tokenizer: Tokenizer) -> None:
    """Also where the process was killed, and all must be compiled and read anew."""
    large = [LLMatcher.grammar_from_regex(r"(?i)\p{L}" * 300 + f"turns{number}") for number in range(6)]
    alive = [state([5], sequence_id=number, form=form, form_owner=b"its owner") for number, form in enumerate(large, 1)]
    alive.append(written(tokenizer, "y", 9, CHOICE, b"another"))
    for _ in range(2):
        found = followers(forms, tokenizer, alive)
        while found[-1] is None:
            found = followers(forms, tokenizer, alive)
        assert found[-1] == "y"
        assert found.count(None) >= len(large) - 2
        while None in found:
            found = followers(forms, tokenizer, alive)
        forms._process.kill()
        psutil.wait_procs([forms._process], 10)


def test_memory_is_taken_from_the_owner_that_has_most_of_it(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would come to its end by it, and would so again when all is read anew."""
    monkeypatch.setattr(form_turns, "MAX_TOGETHER", 24 << 20)
    large = [written(tokenizer, "1," * 1_200, number, LIST, b"its owner") for number in range(1, 9)]
    others = [written(tokenizer, "1,", number, LIST, b"another") for number in (20, 21)]
    found = followers(forms, tokenizer, [*large, *others])
    process = forms._process
    while None in found:
        found = followers(forms, tokenizer, [*large, *others])
    assert forms._process is process
    assert found[-2:] == ["0123456789"] * 2
    assert 1 < found.count("0123456789") - 2 < len(large)
    assert found.count("") == len(large) + 2 - found.count("0123456789")


def test_what_a_forms_tokens_cost_together_ends_its_own_output(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_progress, "TOKEN_SECONDS", 0.0)
    costly, other, third = (state([5], sequence_id=number, form=LIST) for number in (1, 2, 3))
    for one in (costly, other, third):
        assert until_read(forms, tokenizer, one)[0] == "0123456789"
    costly.form_progress.left = 0.0  # type: ignore[attr-defined]
    assert followers(forms, tokenizer, [costly, other]) == ["", "0123456789"]
    assert followers(forms, tokenizer, [third, costly]) == ["0123456789", ""]


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=60), st.randoms())
def test_what_an_output_may_still_cost_is_no_less_where_it_is_read_anew(
    costs: list[tuple[float, float]], random: Random
) -> None:
    """costs: seconds to read each token, and to find the mask behind it."""
    undisturbed, again = (form_progress.Progress(0, deque()) for _ in range(2))
    undisturbed.num_masks = 1
    unread, behind = costs[:], 0.0
    for reading, mask in costs:
        undisturbed.charge(reading + mask, 1)
        if undisturbed.left < 0:
            return
        behind = mask
    while unread:
        number = random.randint(1, len(unread))
        again.charge(sum(reading for reading, _ in unread[:number]) + behind * (number == len(unread)), number)
        assert again.left >= 0
        del unread[:number]
    assert again.left >= undisturbed.left - 1e-9


def test_a_process_that_does_not_answer_is_no_evidence_against_a_form(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped from outside, say, and so is asked again elsewhere."""
    one, seconds, end = state([5], sequence_id=1, form=LIST), forms_module.DEAF_SECONDS, forms._end

    def patient_end() -> None:
        monkeypatch.setattr(forms_module, "DEAF_SECONDS", seconds)
        end()

    monkeypatch.setattr(forms, "_end", patient_end)
    monkeypatch.setattr(forms_module, "DEAF_SECONDS", 0.0)
    process: psutil.Process = forms._process
    process.suspend()
    assert followers(forms, tokenizer, [one]) == ["0123456789"]
    assert not forms._bans
