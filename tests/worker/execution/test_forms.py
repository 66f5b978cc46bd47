"""Outputs have the forms that were asked for, whatever the model would rather say: its logits are random here."""

import asyncio
import gc
import itertools
import json
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from form_texts import GRAMMARS, REGEXES, SCHEMAS, SUITE
from llguidance import LLMatcher, LLTokenizer
from tiny_model import write_byte_tokenizer
from tokenizers import Tokenizer, models
from worker_helpers import mask_of, state, tokens

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.start_error import StartError
from scheduler_service.frontend.forms import forms as frontend
from worker_service.execution.sampling import form_process
from worker_service.execution.sampling import forms as forms_module
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.form_process import HEAD, MAX_KEPT, Follower, Work
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.sampling.sampler import BARRED, sample
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams

END, VOCABULARY = 2, 259
MAX_TOKENS = 400
CLOSERS = '"}],:0123456789)b'
"""Likelier than other bytes, so that most outputs end: a string that is ended by one of 200 bytes is long."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return directory


@pytest.fixture(scope="module")
def forms(directory: Path) -> Iterator[Forms]:
    found = Forms.load(sorted(directory.iterdir()), VOCABULARY)
    assert found is not None
    assert found.is_ready()
    yield found
    found.close()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def follower(directory: Path) -> Follower:
    tokenizer = LLTokenizer((directory / "tokenizer.json").read_text(), n_vocab=VOCABULARY, eos_token=[END])
    return Follower(tokenizer, VOCABULARY)


def grammars(kind: str, texts: Sequence[str]) -> list[str]:
    found = [grammar for grammar in grammars_or_none(kind, texts) if grammar is not None]
    assert len(found) == len(texts)
    return found


def grammars_or_none(kind: str, texts: Sequence[str]) -> list[str | None]:
    """None for a text that is refused."""

    async def read() -> list[str | None]:
        reader, found = frontend.Forms(), list[str | None]()
        for text in texts:
            try:
                found.append(await reader.read(pb.SamplingParams(**{kind: text})))  # type: ignore[arg-type]
            except frontend.FormError:
                found.append(None)
        return found

    return asyncio.run(read())


def sequences(grammars: Sequence[str], tokenizer: Tokenizer, **sampling: Any) -> list[SequenceState]:
    bias = tuple((tokenizer.token_to_id(closer), 3.0) for closer in CLOSERS)
    return [
        state([5, 6], sequence_id=number, form=grammar, seed=number, logit_bias=bias, **sampling)
        for number, grammar in enumerate(grammars)
    ]


def masks_of(forms: Forms, chunks: Sequence[ScheduledChunk]) -> FormMasks:
    """In as many steps as it takes until none is late: forms that come together are compiled in several."""
    while (masks := forms.begin(chunks)).late():
        pass
    return masks


def step(forms: Forms, alive: Sequence[SequenceState]) -> list[int]:
    """A step of the worker, with logits that depend on the sequence and its length alone."""
    chunks = [ScheduledChunk(one, len(one.token_ids) - 1, len(one.token_ids), samples=True) for one in alive]
    masks = masks_of(forms, chunks)
    logits = torch.stack(
        [
            torch.randn(
                VOCABULARY, generator=torch.Generator().manual_seed(one.sequence_id * 1009 + len(one.token_ids))
            )
            for one in alive
        ]
    )
    token_ids: list[int] = sample(logits, alive, masks).tolist()
    for one, token_id in zip(alive, token_ids, strict=True):
        one.token_ids.append(token_id)
    return token_ids


def complete(forms: Forms, all_sequences: Sequence[SequenceState], most_tokens: int = MAX_TOKENS) -> None:
    """Until each has ended or has as many tokens as it may."""
    alive = list(all_sequences)
    while alive:
        token_ids = step(forms, alive)
        assert BARRED not in token_ids
        alive = [
            one
            for one, token_id in zip(alive, token_ids, strict=True)
            if token_id != END and len(one.token_ids) < most_tokens
        ]


def text(one: SequenceState, tokenizer: Tokenizer) -> str | None:
    """Of an output that has ended."""
    return tokenizer.decode(list(one.token_ids[2:-1])) if one.token_ids[-1] == END else None


def test_no_two_of_the_forms_are_the_same() -> None:
    assert [len({*texts}) for texts in (SCHEMAS, REGEXES, GRAMMARS)] == [300, 100, 20]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_every_output_that_ends_is_valid_for_its_schema(forms: Forms, tokenizer: Tokenizer, temperature: float) -> None:
    running = sequences(grammars("json_schema", SCHEMAS), tokenizer, temperature=temperature)
    complete(forms, running)
    num_ended = 0
    for schema, one in zip(SCHEMAS, running, strict=True):
        if (found := text(one, tokenizer)) is not None:
            num_ended += 1
            jsonschema.validate(json.loads(found), json.loads(schema), format_checker=jsonschema.FormatChecker())
    assert num_ended >= 0.8 * len(SCHEMAS), "some have several long strings"


@pytest.fixture(scope="module")
def suite() -> list[tuple[dict[str, Any], str]]:
    """The groups of JSON Schema's own tests whose schema can be followed, each with the grammar of it."""
    read = grammars_or_none("json_schema", [json.dumps(group["schema"]) for group in SUITE])
    found = [(group, grammar) for group, grammar in zip(SUITE, read, strict=True) if grammar is not None]
    assert len(found) >= 160, "of 368; the others are refused"
    return found


def may_be_written(follower: Follower, grammar: str, token_ids: Sequence[int]) -> bool:
    """Each token after those before it."""
    read: list[int] = []
    try:
        for token_id in token_ids:
            mask = mask_of(follower, Work(0, "" if read else grammar, read, samples=True))
            if not mask or not mask[token_id // 8] >> token_id % 8 & 1:
                return False
            read = [token_id]
        return True
    finally:
        follower.forget(0)


def test_of_json_schemas_own_tests_what_is_valid_may_be_written_and_nothing_else(
    follower: Follower, tokenizer: Tokenizer, suite: list[tuple[dict[str, Any], str]]
) -> None:
    """Some of what is valid may not: 1.0 for 1, properties in another order, and what a format only describes."""
    valid = []
    for group, grammar in suite:
        for case in group["tests"]:
            text = json.dumps(case["data"], ensure_ascii=False, separators=(",", ":"))
            token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, END]
            is_written = may_be_written(follower, grammar, token_ids)
            assert case["valid"] or not is_written, (group["description"], case["description"])
            if case["valid"]:
                valid.append(is_written)
    assert sum(valid) >= 0.93 * len(valid)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_every_output_that_ends_is_valid_for_a_schema_of_json_schemas_own_tests(
    forms: Forms, tokenizer: Tokenizer, suite: list[tuple[dict[str, Any], str]], temperature: float
) -> None:
    running = sequences([grammar for _, grammar in suite], tokenizer, temperature=temperature)
    complete(forms, running, most_tokens=100)
    num_ended = 0
    for (group, _), one in zip(suite, running, strict=True):
        if (found := text(one, tokenizer)) is not None:
            num_ended += 1
            jsonschema.Draft202012Validator(group["schema"]).validate(json.loads(found))
    assert num_ended >= 0.3 * len(suite), "many of the schemas allow any text, which ends late"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_every_output_that_ends_matches_its_expression(forms: Forms, tokenizer: Tokenizer, temperature: float) -> None:
    running = sequences(grammars("regex", REGEXES), tokenizer, temperature=temperature)
    complete(forms, running)
    num_ended = 0
    for expression, one in zip(REGEXES, running, strict=True):
        if (found := text(one, tokenizer)) is not None:
            num_ended += 1
            assert re.fullmatch(expression, found), (expression, found)
    assert num_ended >= 0.8 * len(REGEXES)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_every_output_that_ends_is_of_its_grammar(forms: Forms, tokenizer: Tokenizer, temperature: float) -> None:
    running = sequences(grammars("grammar", [grammar for grammar, _ in GRAMMARS]), tokenizer, temperature=temperature)
    complete(forms, running)
    for (grammar, expression), one in zip(GRAMMARS, running, strict=True):
        found = text(one, tokenizer)
        assert found is None or re.fullmatch(expression, found), (grammar, found)
    assert sum(one.token_ids[-1] == END for one in running) >= 0.8 * len(running)


def test_an_output_goes_on_the_same_wherever_its_sequence_is_new(forms: Forms, tokenizer: Tokenizer) -> None:
    """As after a preemption, the loss of a worker, or a resumed stream, in the middle of everything."""
    some = grammars("json_schema", SCHEMAS[::10])
    undisturbed = sequences(some, tokenizer, temperature=1.0)
    complete(forms, undisturbed)
    disturbed = sequences(some, tokenizer, temperature=1.0)
    for cut in (1, 2, 5, 11, 30):
        for one in disturbed:
            while len(one.token_ids) < cut and one.token_ids[-1] != END:
                step(forms, [one])
            one.form_progress = None
    complete(forms, [one for one in disturbed if one.token_ids[-1] != END])
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]


@pytest.mark.parametrize("seed", range(2))
def test_after_each_guess_may_come_what_may_come_once_it_is_chosen(
    forms: Forms, follower: Follower, tokenizer: Tokenizer, seed: int
) -> None:
    """And guesses that are not chosen leave nothing behind."""
    some = grammars("json_schema", SCHEMAS[seed::12]) + grammars("regex", REGEXES[seed::12])
    random, num_possible = Random(seed), 0
    for whole in sequences(some, tokenizer, temperature=1.0):
        complete(forms, [whole], 60)
        again = state([5, 6], sequence_id=1, form=whole.sampling.form)
        for known in range(2, len(whole.token_ids)):
            guesses = whole.token_ids[known : known + 3]
            if random.random() < 0.7:
                guesses[random.randrange(len(guesses))] = random.randrange(VOCABULARY)
            masks = masks_of(
                forms, [ScheduledChunk(again, known - 1, known + len(guesses), samples=True, drafts=guesses)]
            )
            after = [replace(again, token_ids=again.token_ids + guesses[:n]) for n in range(len(guesses) + 1)]
            for one, mask in zip(after, masks.of(after), strict=True):
                if END in one.token_ids[:-1]:
                    break
                expected = mask_of(follower, Work(known, again.sampling.form, one.token_ids[2:], samples=True))
                follower.forget(known)
                if END not in one.token_ids:
                    assert mask.tobytes() == (expected or bytes(len(mask)))
                    num_possible += mask.any()
            again.token_ids.append(whole.token_ids[known])
    assert num_possible > 500


@pytest.mark.parametrize("is_late", [False, True], ids=["limits", "time"])
def test_a_guess_beyond_which_a_form_cannot_be_followed_costs_no_output_anything(
    forms: Forms, tokenizer: Tokenizer, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reaches limits that outputs share, or takes too long, as it is made to look here."""
    (choice,) = grammars("regex", [f"{'xy' if is_late else 'x[yw]'}|z{SLOW}"])
    one, other = (state([5], sequence_id=number, form=choice) for number in (1, 2))
    guesses = tokens([tokenizer.token_to_id("z"), tokenizer.token_to_id("a")])
    answers, receive = itertools.count(), forms._receive

    def receive_late(reader: Connection) -> bytes:
        if next(answers) == 1:
            raise TimeoutError
        return receive(reader)

    if is_late:
        monkeypatch.setattr(forms, "_receive", receive_late)
    first = forms._process if is_late else None
    processes = []
    for drafts in (guesses, guesses, tokens([])):
        chunks = [ScheduledChunk(each, 0, 1 + len(drafts), samples=True, drafts=drafts) for each in (one, other)]
        masks = masks_of(forms, chunks)
        after = [replace(one, token_ids=one.token_ids + drafts[:n]) for n in range(len(drafts) + 1)]
        found = [np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() for mask in masks.of([*after, other])]
        assert found[0] == found[-1] == sorted(tokenizer.token_to_id(letter) for letter in "xz")
        assert not any(found[2:-1])
        processes.append(forms._process)
    assert first is not processes[0] is processes[1] is processes[2]
    one.token_ids.append(tokenizer.token_to_id("x"))
    assert step(forms, [one])[0] in {tokenizer.token_to_id(letter) for letter in "yw"}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_output_ends_by_its_own_tokens_alone(
    forms: Forms, tokenizer: Tokenizer, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read for guesses, for others, or since its sequence was new, may reach the library's limits, as half of
    the answers are made to say here that are not of a matcher that was made for them."""
    some = grammars("json_schema", [SCHEMA] * 3)
    undisturbed, disturbed = sequences(some, tokenizer), sequences(some, tokenizer)
    complete(forms, undisturbed)
    random, send, receive, may_fail = Random(1), forms._send, forms._receive, deque[bool]()

    def noted(reader: Connection, items: Sequence[Any]) -> None:
        send(reader, items)
        may_fail.extend(not item.progress.is_fresh for item in items for _ in range(1 + len(item.drafts)))

    def failing(reader: Connection) -> bytes:
        answer = receive(reader)
        return HEAD.pack(0.0, 0, 0, False) if may_fail.popleft() and random.random() < 0.5 else answer

    monkeypatch.setattr(forms, "_send", noted)
    monkeypatch.setattr(forms, "_receive", failing)
    alive = list(zip(disturbed, undisturbed, strict=True))
    while alive:
        chunks = []
        for one, whole in alive:
            known = len(one.token_ids)
            guesses = whole.token_ids[known : known + num_drafts]
            chunks.append(ScheduledChunk(one, known - 1, known + len(guesses), samples=True, drafts=guesses))
        masks = masks_of(forms, chunks)
        for one, whole in alive:
            logits = torch.full((1, VOCABULARY), -1.0)
            logits[0, whole.token_ids[len(one.token_ids)]] = 1.0
            one.token_ids.extend(sample(logits, [replace(one, sampling=SamplingParams(form="any"))], masks).tolist())
        alive = [(one, whole) for one, whole in alive if len(one.token_ids) < len(whole.token_ids)]
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]


def test_an_output_that_fails_and_whose_process_dies_then_is_asked_for_once(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (form,) = grammars("regex", ["ab"])
    left_its_form = state([5, tokenizer.token_to_id("x")], 1, sequence_id=1, form=form)
    sent, send, receive, answers = [], forms._send, forms._receive, itertools.count()

    def noted(reader: Connection, items: Sequence[Any]) -> None:
        send(reader, items)
        sent.append(len(items))
        assert len(sent) < 10, "it goes on and on"

    def dying(reader: Connection) -> bytes:
        if next(answers) == 1:
            raise EOFError
        return receive(reader)

    monkeypatch.setattr(forms, "_send", noted)
    monkeypatch.setattr(forms, "_receive", dying)
    guesses = tokens([tokenizer.token_to_id("a")] * 2)
    chunks = [ScheduledChunk(left_its_form, 1, 4, samples=True, drafts=guesses)]
    while (masks := forms.begin(chunks)).late():
        assert {*sent} == {1}
        sent.clear()
    assert not masks.of([left_its_form]).any()


def test_a_process_that_dies_at_work_is_asked_again_and_no_output_ends(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too little memory on its machine, say."""
    some = grammars("json_schema", [SCHEMA] * 3)
    undisturbed, disturbed = sequences(some, tokenizer), sequences(some, tokenizer)
    complete(forms, undisturbed)
    receive, answers = forms._receive, itertools.count()

    def killed(reader: Connection) -> bytes:
        if next(answers) % 10 == 4:
            forms._process.kill()
            forms._process.wait()
        return receive(reader)

    monkeypatch.setattr(forms, "_receive", killed)
    complete(forms, disturbed)
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]


def test_guesses_of_an_output_share_the_time_of_one_mask(
    forms: Forms, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the clocks are made to look, the first guess has used it up."""
    (form,) = grammars("regex", ["xyz{3}"])
    one = state([5], sequence_id=1, form=form)
    seconds = itertools.count()
    monkeypatch.setattr(forms_module, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(forms_module, "_processor_seconds", lambda process: float(next(seconds)))
    drafts = tokens([tokenizer.token_to_id(letter) for letter in "xyz"])
    masks = masks_of(forms, [ScheduledChunk(one, 0, 4, samples=True, drafts=drafts)])
    after = [replace(one, token_ids=one.token_ids + drafts[:n]) for n in range(4)]
    assert [mask.any() for mask in masks.of(after)] == [True, False, False, False]


def test_other_parameters_bend_what_the_form_allows_and_no_more(forms: Forms, tokenizer: Tokenizer) -> None:
    (choice,) = grammars("regex", ["(one|two|three)"])
    token_ids = {letter: tokenizer.token_to_id(letter) for letter in "onexyzw"}
    for sampling, words in (
        ({"logit_bias": ((token_ids["o"], 100.0), (70, 100.0))}, {"one"}),
        ({"bad_words": ((token_ids["o"],), (token_ids["w"],))}, {"three"}),
        ({"allowed_token_ids": tokens([*(token_ids[letter] for letter in "onexyz"), END])}, {"one"}),
        ({"top_k": 1, "temperature": 1.0}, {"one", "two", "three"}),
        ({"repetition_penalty": 2.0, "presence_penalty": 2.0}, {"one", "two", "three"}),
    ):
        running = [state([5, 6], sequence_id=number, form=choice, **sampling) for number in range(4)]
        complete(forms, running)
        assert {text(one, tokenizer) for one in running} <= words, sampling


def test_where_nothing_may_follow_that_sequence_fails_alone(forms: Forms, tokenizer: Tokenizer) -> None:
    (choice,) = grammars("regex", ["ab"])
    banned = state([5], sequence_id=1, form=choice, bad_words=((tokenizer.token_to_id("a"),),))
    strange = state([5], sequence_id=2, form="no grammar at all {")
    other = state([5, 70], sequence_id=3, form=choice)  # an output that has left its form
    other.num_prompt_tokens = 1
    sound = state([5], sequence_id=4, form=choice)
    plain = state([5], sequence_id=5)
    found = step(forms, [banned, strange, other, sound, plain])
    assert found[:4] == [BARRED, BARRED, BARRED, tokenizer.token_to_id("a")]
    assert found[4] >= 0


def test_a_whole_text_is_followed_by_the_end_alone_and_nothing_is_asked_of_it_then(
    forms: Forms, tokenizer: Tokenizer
) -> None:
    """A step that is planned ahead may contain a sequence that has ended."""
    (choice,) = grammars("regex", ["ab"])
    one = state([5], sequence_id=1, form=choice)
    assert [step(forms, [one])[0] for _ in range(4)] == [tokenizer.token_to_id(letter) for letter in "ab"] + [END, END]


def test_what_a_step_has_no_time_for_is_late_and_comes_next(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = LLMatcher.grammar_from_regex("[ab]{5}")
    a = next(token_id for token_id in range(VOCABULARY) if may_be_written(follower, form, [token_id, token_id]))
    expected = mask_of(follower, Work(1, form, [], samples=True))
    work = [Work(key, form, [a], samples=True, drafts=[a]) for key in (2, 3)]
    monkeypatch.setattr(form_process, "MAX_SECONDS", 0.0)
    heads = [HEAD.unpack_from(answer) for answer in follower.do(work)]
    assert [is_late for *_, is_late in heads] == [True] * 4
    monkeypatch.undo()
    answers = [*follower.do([one._replace(form="", token_ids=[]) for one in work])]
    assert [answer[HEAD.size :] for answer in answers] == [expected] * 4
    assert [HEAD.unpack_from(answer)[-2:] for answer in answers] == [(1, False), (0, False)] * 2


def test_grammars_that_were_used_lately_are_kept(follower: Follower) -> None:
    for key, expression in enumerate(grammars("regex", [f"a{{{number}}}" for number in range(1, 50)])):
        mask_of(follower, Work(key, expression, [], samples=True))
    assert len(follower._compiled) == MAX_KEPT
    assert len(follower._outputs) == 49
    for key in range(49):
        follower.forget(key)
    assert not follower._outputs


def test_outputs_that_are_gone_are_forgotten(forms: Forms) -> None:
    (choice,) = grammars("regex", ["ab"])
    one = state([5], sequence_id=1, form=choice)
    step(forms, [one])
    key = one.form_progress.key  # type: ignore[attr-defined]
    del one
    gc.collect()
    assert key in forms._gone
    step(forms, [state([5], sequence_id=2, form=choice)])
    assert key not in forms._gone


SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
SLOW = "(a|aa|aaa){1,1000}" * 300
"""Of which the first mask takes 15 s, and the library does not count it as work."""


def test_a_form_that_takes_too_long_ends_its_own_output_and_is_not_tried_again(
    forms: Forms, tokenizer: Tokenizer
) -> None:
    some = grammars("json_schema", [SCHEMA] * 5)
    undisturbed, others = sequences(some, tokenizer), sequences(some, tokenizer)  # none of which ends at once
    complete(forms, undisturbed)
    for _ in range(3):
        step(forms, others)
    slow = LLMatcher.grammar_from_regex(SLOW)  # a front end would not let it come
    began = time.monotonic()
    found = step(forms, [*others[:2], state([5], sequence_id=90, form=slow), *others[2:]])
    assert found[2] == BARRED
    assert BARRED not in found[:2] + found[3:]
    took = time.monotonic() - began
    process = forms._process
    assert step(forms, [state([5], sequence_id=91, form=slow)]) == [BARRED]
    assert forms._process is process  # nothing was asked
    complete(forms, [one for one in others if one.token_ids[-1] != END])
    assert [one.token_ids for one in others] == [one.token_ids for one in undisturbed]
    assert took < 10, "the mask itself takes longer"


@pytest.mark.parametrize("ends", ["reader", "template"])
def test_outputs_go_on_when_a_process_is_killed(forms: Forms, tokenizer: Tokenizer, ends: str) -> None:
    some = grammars("json_schema", [SCHEMA] * 5)
    undisturbed, disturbed = sequences(some, tokenizer), sequences(some, tokenizer)
    complete(forms, undisturbed)
    for _ in range(3):
        step(forms, disturbed)
    alive = [one for one in disturbed if END not in one.token_ids]
    if ends == "template":
        forms._template.kill()  # which takes the other one with it
        forms._template.wait()
    else:
        forms._process.kill()
    psutil.wait_procs([forms._process], 10)
    complete(forms, alive)
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]


def test_without_a_tokenizer_or_an_end_there_are_no_forms(directory: Path, tmp_path: Path) -> None:
    assert Forms.load([directory / "config.json"], VOCABULARY) is None
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    assert Forms.load([tmp_path / "tokenizer.json"], VOCABULARY) is None
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": END}))
    Tokenizer(models.Unigram([("a", 0.0)])).save(str(tmp_path / "tokenizer.json"))
    unreadable = Forms.load(sorted(tmp_path.iterdir()), VOCABULARY)
    assert unreadable is not None
    assert not unreadable.is_ready()
    unreadable.close()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"tokenizer\.json has no vocabulary"):
        Forms.load(sorted(tmp_path.iterdir()), VOCABULARY)


def test_the_tokenizers_own_end_ends_a_form(directory: Path, tmp_path: Path) -> None:
    """Also where config.json and generation_config.json name no end, or another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    for config, ends in (({}, "2"), ({"eos_token_id": 0}, "0,2")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = Forms.load(sorted(tmp_path.iterdir()), VOCABULARY)
        assert found is not None
        assert found._arguments[2] == ends
        found.close()
