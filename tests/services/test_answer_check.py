import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core import (
    EncoderItem,
    ModelOutput,
    PoolingParams,
    PoolingType,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.engine.sessions.answer_check import check_answer


def with_one_that_has_left() -> tuple[SchedulerOutput, Sequence, Sequence]:
    """Two requests run out of blocks while a step is in flight: the later one is preempted, and loses its id.

    The step, the sequence that stays, and the one that has left. Both ask for log-probabilities of their own tokens.
    """
    config = SchedulerConfig(
        block_size=4, num_device_blocks=4, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=16, watermark=0
    )
    scheduler = Scheduler(config, WaitingQueue())
    for name in "ab":
        scheduler.add_request(SequenceGroup(name, range(1, 8), SamplingParams(max_tokens=9, logprobs=0)))
    output, *_ = (scheduler.schedule() for _ in range(3))
    (dropped,) = output.dropped
    stays, left = (scheduled.sequence for scheduled in output.scheduled)
    assert left is dropped
    return output, stays, left


def test_an_answer_about_sequences_that_have_left_the_worker_is_no_lie() -> None:
    output, stays, left = with_one_that_has_left()
    assert left.id == 0
    answer = ModelOutput(1, [5, 5])
    with pytest.raises(ValueError, match=f"of 0 tokens for sequence {stays.id}, which gained 1"):
        check_answer(output, answer, 100)
    del output.scheduled[0]
    check_answer(output, answer, 100)


def test_only_an_output_that_has_begun_in_a_form_may_gain_no_token() -> None:
    config = SchedulerConfig(
        block_size=4, num_device_blocks=8, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=16
    )
    for form, may_be_late in (("a form", True), ("", False)):
        scheduler = Scheduler(config, WaitingQueue())
        scheduler.add_request(SequenceGroup("a", range(1, 4), SamplingParams(max_tokens=9, form=form, logprobs=0)))
        late, output = ModelOutput(1, [], [0]), scheduler.schedule()
        if may_be_late:
            check_answer(output, late, 100)
        else:
            with pytest.raises(ValueError, match="returned no token for sequence"):
                check_answer(output, late, 100)


def test_what_is_said_of_log_probabilities_that_are_none_names_no_tokens() -> None:
    """The error is logged, and the tokens may be a prompt's."""
    config = SchedulerConfig(
        block_size=4, num_device_blocks=4, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=16
    )
    scheduler = Scheduler(config, WaitingQueue())
    scheduler.add_request(SequenceGroup("a", range(1, 8), SamplingParams(max_tokens=9, logprobs=1)))
    output = scheduler.schedule()
    sequence = output.scheduled[0].sequence
    entry = TokenLogprobs([31337] * 1000, [-1.0] * 1000, 1)
    with pytest.raises(ValueError, match=f"for sequence {sequence.id}: 999 likeliest tokens instead of 1") as error:
        check_answer(output, ModelOutput(1, [5], logprobs={sequence.id: [entry]}), 50_000)
    assert "31337" not in str(error.value)


def with_a_prompt_to_report() -> tuple[Scheduler, Sequence]:
    """A request for log-probabilities of its prompt of seven tokens, of which a step computes four."""
    config = SchedulerConfig(
        block_size=4, num_device_blocks=8, max_num_batched_tokens=4, max_num_seqs=2, max_model_len=16
    )
    scheduler = Scheduler(config, WaitingQueue())
    group = SequenceGroup("a", range(1, 8), SamplingParams(max_tokens=9, prompt_logprobs=0))
    scheduler.add_request(group)
    return scheduler, group.sequences[0]


def positions(first: int, count: int) -> list[TokenLogprobs]:
    """Of the prompt's tokens from this one on, which are counted from 1."""
    return [TokenLogprobs([1 + position], [-1.0], 1) for position in range(first, first + count)]


def test_every_token_of_a_prompt_but_the_first_has_log_probabilities() -> None:
    """Those behind a chunk's tokens come with it, whatever has been sent meanwhile."""
    scheduler, sequence = with_a_prompt_to_report()
    steps = [scheduler.schedule(), scheduler.schedule()]
    for output, token_ids, first, due in zip(steps, ([], [5]), (1, 5), (4, 2), strict=True):
        for number in range(6):
            answer = ModelOutput(output.step_id, token_ids, prompt_logprobs={sequence.id: positions(first, number)})
            if number == due:
                check_answer(output, answer, 100)
            else:
                said = f"{number} prompt positions for sequence {sequence.id}, not {due}"
                with pytest.raises(ValueError, match=said):
                    check_answer(output, answer, 100)
        answer = ModelOutput(output.step_id, token_ids, prompt_logprobs={sequence.id: positions(first - 1, due)})
        with pytest.raises(ValueError, match="they are for another token"):
            check_answer(output, answer, 100)
        answer = ModelOutput(output.step_id, token_ids, prompt_logprobs={sequence.id: positions(first, due)})
        scheduler.update_from_output(output, answer)
    check_answer(scheduler.schedule(), ModelOutput(3, [5]), 100)


def test_positions_of_a_prompt_that_was_given_up_are_bounded() -> None:
    scheduler, sequence = with_a_prompt_to_report()
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish_requests(["a"], SequenceStatus.FINISHED_ABORTED)
    for output, token_ids, num_tokens in zip(steps, ([], [5]), (4, 3), strict=True):
        for number in (num_tokens, num_tokens + 1):
            answer = ModelOutput(output.step_id, token_ids, prompt_logprobs={sequence.id: positions(1, number)})
            if number == num_tokens:
                check_answer(output, answer, 100)
            else:
                with pytest.raises(ValueError, match="prompt positions"):
                    check_answer(output, answer, 100)


LIES: dict[str, tuple[TokenLogprobs, str]] = {
    "about another token": (TokenLogprobs([6, 5, 7], [-1.0] * 3, 1), "they are for another token"),
    "no rank": (TokenLogprobs([5, 5, 7], [-1.0] * 3, 0), "an impossible rank"),
    "a rank behind the last": (TokenLogprobs([5, 5, 7], [-1.0] * 3, 101), "an impossible rank"),
    "one of the likeliest twice": (TokenLogprobs([5, 7, 7], [-1.0] * 3, 1), "or one twice"),
    "a token that does not exist": (TokenLogprobs([5, 5, 100], [-1.0] * 3, 1), "or beyond the vocabulary"),
    "too few": (TokenLogprobs([5, 5], [-1.0] * 2, 1), "1 likeliest tokens instead of 2"),
    "the likeliest last": (TokenLogprobs([5, 6, 7], [-1.0, -2.0, -1.0], 1), "out of order"),
    "more than certain": (TokenLogprobs([5, 6, 7], [-1.0, -0.1, -0.1], 1), "they are out of order, contradict"),
    "two values of one token": (TokenLogprobs([5, 5, 7], [-1.0, -0.5, -1.5], 1), "they are out of order, contradict"),
    "nothing": (TokenLogprobs([], [], 1), "0 likeliest tokens instead of 2"),
}


@pytest.mark.parametrize("lie", LIES)
def test_log_probabilities_are_about_the_token_that_was_sampled_and_others(lie: str) -> None:
    scheduler, _ = with_a_prompt_to_report()
    scheduler.add_request(SequenceGroup("b", range(1, 4), SamplingParams(max_tokens=9, logprobs=2)))
    scheduler.finish_requests(["a"], SequenceStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    sequence_id = output.scheduled[0].sequence.id
    check_answer(output, ModelOutput(1, [5], logprobs={sequence_id: [TokenLogprobs([5, 5, 7], [-1.0] * 3, 1)]}), 100)
    entry, reason = LIES[lie]
    with pytest.raises(ValueError, match=reason):
        check_answer(output, ModelOutput(1, [5], logprobs={sequence_id: [entry]}), 100)


@pytest.mark.parametrize("logprobs", [[-1.0, 0.5], [-math.inf, -1.0], [-1.0, math.nan], [math.inf, -math.inf]])
def test_log_probabilities_are_finite_and_not_positive(logprobs: list[float]) -> None:
    scheduler, _ = with_a_prompt_to_report()
    scheduler.add_request(SequenceGroup("b", range(1, 4), SamplingParams(max_tokens=9, logprobs=1)))
    scheduler.finish_requests(["a"], SequenceStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    sequence_id = output.scheduled[0].sequence.id
    for said in (logprobs, [-9999.0, 1e-7]):
        answer = ModelOutput(1, [5], logprobs={sequence_id: [TokenLogprobs([5, 6], said, 1)]})
        if said is logprobs:
            with pytest.raises(ValueError, match="positive, NaN or infinite"):
                check_answer(output, answer, 100)
        else:
            check_answer(output, answer, 100)


def test_what_is_said_of_a_sequence_that_has_left_is_not_taken_for_anothers() -> None:
    """It may have the id of a sequence of this step by now, which another worker gave it."""
    output, stays, left = with_one_that_has_left()
    left.id = stays.id
    check_answer(output, ModelOutput(1, [5, 5], [1, 1], {stays.id: [TokenLogprobs([5], [-1.0], 1)]}), 100)


@pytest.mark.parametrize(
    ("num_tokens", "verified", "sentence"),
    [([1, 1], [0, 2**32 - 1], "verified 4294967295 drafts for sequence 0, not 0"), ([1, 9], [], "returned 9 tokens")],
)
def test_what_is_counted_of_a_sequence_that_has_left_is_bounded(
    num_tokens: list[int], verified: list[int], sentence: str
) -> None:
    output, stays, _ = with_one_that_has_left()
    logprobs = {stays.id: [TokenLogprobs([5], [-1.0], 1)]}
    with pytest.raises(ValueError, match=sentence):
        check_answer(
            output, ModelOutput(1, [5] * sum(num_tokens), num_tokens, logprobs, num_draft_tokens=verified), 100
        )


def test_tokens_are_counted_of_every_sequence_that_samples() -> None:
    output, stays, _ = with_one_that_has_left()
    logprobs = {stays.id: [TokenLogprobs([5], [-1.0], 1)]}
    with pytest.raises(ValueError, match="counted tokens of 1 samples of 2"):
        check_answer(output, ModelOutput(1, [5, 5], [2], logprobs), 100)


def test_a_sequence_that_failed_has_gained_no_guesses() -> None:
    _, output, sequence_id, entry = with_two_guesses()
    answer = right_guess({sequence_id: [entry] * 2}, failed_sequence_ids=frozenset([sequence_id]))
    with pytest.raises(ValueError, match=f"returned 2 tokens for sequence {sequence_id}"):
        check_answer(output, answer, 100)


def right_guess(logprobs: dict[int, list[TokenLogprobs]], **more: Any) -> ModelOutput:
    """The second step's answer: one of two guesses was right."""
    return ModelOutput(2, [5, 5], [2], logprobs, num_draft_tokens=[2], **more)


@pytest.mark.parametrize(
    ("num_tokens", "verified", "sentence"),
    [
        ([3], [3], "verified 3 drafts for sequence 1, not 2"),
        ([2], [], "returned 2 tokens for sequence 1"),
        ([3], [1], "returned 3 tokens for sequence 1"),
        ([1], [3], "verified 3 drafts for sequence 1, not 2"),
    ],
)
def test_no_more_is_verified_than_there_is_room_for_and_no_more_is_right(
    num_tokens: list[int], verified: list[int], sentence: str
) -> None:
    _, output, _, _ = with_two_guesses()
    with pytest.raises(ValueError, match=sentence):
        check_answer(output, ModelOutput(2, [5] * sum(num_tokens), num_tokens, num_draft_tokens=verified), 100)


@pytest.mark.parametrize("column", ["num_draft_tokens", "num_draft_tokens_wanted"])
def test_guesses_are_counted_for_every_sequence_that_samples(column: str) -> None:
    scheduler, output, sequence_id, entry = with_two_guesses()
    answer = replace(right_guess({sequence_id: [entry] * 2}), **{column: [2, 2]})
    with pytest.raises(ValueError, match="counted drafts of 2 samples, and the step has 1"):
        scheduler.update_from_output(output, answer)


def with_two_guesses() -> tuple[Scheduler, SchedulerOutput, int, TokenLogprobs]:
    """A step that has room for them, of a sequence that asks for log-probabilities, and those of one token."""
    config = SchedulerConfig(
        block_size=4,
        num_device_blocks=8,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        max_model_len=16,
        num_lookahead_slots=2,
    )
    scheduler = Scheduler(config, WaitingQueue())
    scheduler.add_request(SequenceGroup("a", range(1, 8), SamplingParams(max_tokens=9, logprobs=0)))
    output = scheduler.schedule()
    sequence_id = output.scheduled[0].sequence.id
    entry = TokenLogprobs([5], [-1.0], 1)
    answer = ModelOutput(1, [5], logprobs={sequence_id: [entry]}, num_draft_tokens_wanted=[2])
    scheduler.update_from_output(output, answer)
    return scheduler, scheduler.schedule(), sequence_id, entry


def test_each_token_that_was_gained_has_log_probabilities() -> None:
    """Also where guesses were right, and a step gains several tokens of a sequence."""
    scheduler, output, sequence_id, entry = with_two_guesses()
    for num_positions in range(4):
        answer = right_guess({sequence_id: [entry] * num_positions})
        if num_positions == 2:
            check_answer(output, answer, 100)
        else:
            with pytest.raises(ValueError, match=f"of {num_positions} tokens for sequence {sequence_id}, which gained"):
                check_answer(output, answer, 100)
    gained = scheduler.update_from_output(output, right_guess({sequence_id: [entry] * 2}))
    assert [item.logprobs for item in gained] == [entry, entry]


@pytest.mark.parametrize(
    ("kind", "right"), [(PoolingType.LAST, [None, None, 8]), (PoolingType.ALL, [16, 16, 16])], ids=["last", "all"]
)
def test_vectors_have_the_size_that_was_asked_for(kind: PoolingType, right: list[int | None]) -> None:
    """Those of tokens come with every chunk, others with the last one alone."""
    config = SchedulerConfig(
        block_size=2, num_device_blocks=4, max_num_batched_tokens=2, max_num_seqs=2, max_model_len=16
    )
    scheduler = Scheduler(config, WaitingQueue())
    pooling = PoolingParams(type=kind, dimensions=4, half=True)
    scheduler.add_request(SequenceGroup("a", range(6), SamplingParams(max_tokens=1, pooling=pooling)))
    for number, size in enumerate(right):
        output = scheduler.schedule()
        sequence_id = output.scheduled[0].sequence.id
        token_ids = [0] if number == 2 else []
        for wrong in (None, 4, 8, 16, 24):
            answer = ModelOutput(number + 1, token_ids, vectors={} if wrong is None else {sequence_id: bytes(wrong)})
            if wrong == size:
                check_answer(output, answer, 100)
                if size is not None:
                    answer.vectors[sequence_id] = bytes(size - 2) + b"\x00\x7e"
                    with pytest.raises(ValueError, match=f"vectors with NaN or infinity for sequence {sequence_id}"):
                        check_answer(output, answer, 100)
            else:
                with pytest.raises(ValueError, match=f"bytes of vectors for sequence {sequence_id}, not {size or 0}"):
                    check_answer(output, answer, 100)
        vectors = {} if size is None else {sequence_id: bytes(size)}
        scheduler.update_from_output(output, ModelOutput(number + 1, token_ids, vectors=vectors))


def test_only_an_image_that_the_step_encodes_may_have_failed() -> None:
    name = EncoderItem(b"digest", 1)
    check_answer(SchedulerOutput(1, items_to_encode=[name]), ModelOutput(1, [], failed_items=[name]), 100)
    with pytest.raises(ValueError, match="could not decode an image that the step does not encode"):
        check_answer(SchedulerOutput(1), ModelOutput(1, [], failed_items=[name]), 100)
