"""The mirror follows the scheduler's differences and refuses what would touch memory that is not the sequence's."""

from dataclasses import replace
from typing import Any

import pytest
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.errors import FencingError, InvalidStepError
from worker_service.session.sequence_state import NO_DRAFTS, ScheduledChunk
from worker_service.session.session import Session
from worker_service.session.step import BlockTableUpdate, Fork, PoolingParams, PoolingType, SchedulerOutput


class Scheduler:
    """Feeds a session steps in order."""

    def __init__(self) -> None:
        self.session = Session(7, LIMITS)
        self.step_id = 0

    def step(
        self,
        *scheduled: tuple[int, int, bool],
        samples: tuple[int, ...] = (),
        num_tokens: tuple[int, ...] = (),
        drafts: tuple[int, ...] = (),
        **output: Any,
    ) -> list[ScheduledChunk]:
        """Schedule (sequence, tokens, whether it samples), and commit these sampled tokens.

        drafts: guesses that are made in the room for them.
        """
        self.step_id += 1
        ids, counts, whether = zip(*scheduled, strict=True) if scheduled else ((), (), ())
        chunks = self.session.apply(
            SchedulerOutput(7, self.step_id, sequence_ids=ids, num_scheduled_tokens=counts, samples=whether, **output)
        )
        if drafts:
            chunks = [chunk.with_drafts(tokens(drafts)) if chunk.drafts else chunk for chunk in chunks]
        self.session.advance(chunks)
        self.session.fill_in(chunks, samples, num_tokens)
        return chunks


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_sampled_tokens_are_appended_and_computed_next(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0]),))
    (chunk,) = scheduler.step((1, 1, True), samples=(43,))
    assert (chunk.start, chunk.stop) == (3, 4)
    assert list(scheduler.session.sequences[1].token_ids) == [5, 6, 7, 42, 43]


def test_a_sequence_without_a_token_yet_computes_its_last_one_again(scheduler: Scheduler) -> None:
    """Also by a step that was sent ahead, and after guesses."""
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0, 1]),))
    for drafts in ((), (8, 9)):
        room = {"num_draft_tokens": (len(drafts),)} if drafts else {}
        scheduler.step((1, 1 + len(drafts), True), samples=(), num_tokens=(0,), drafts=drafts, **room)
        assert list(scheduler.session.sequences[1].token_ids) == [5, 6, 7, 42]
    (chunk,) = scheduler.step((1, 1, True), samples=(43,))
    assert (chunk.start, chunk.stop) == (3, 4)
    assert list(scheduler.session.sequences[1].token_ids) == [5, 6, 7, 42, 43]


def test_chunks_continue_where_the_last_one_stopped(scheduler: Scheduler) -> None:
    scheduler.step((1, 2, False), new_sequences=(new_sequence(1, range(5), [0, 1]),))
    (chunk,) = scheduler.step((1, 3, True), samples=(9,))
    assert (chunk.start, chunk.stop, chunk.samples) == (2, 5, True)


def test_a_failed_sequence_still_grows_so_that_a_step_sent_ahead_fits(scheduler: Scheduler) -> None:
    scheduler.step((1, 2, True), samples=(0,), new_sequences=(new_sequence(1, [5, 6], [0]),))
    assert scheduler.step((1, 1, True), samples=(0,))


def test_block_table_updates_replace_from_start_on(scheduler: Scheduler) -> None:
    scheduler.step(new_sequences=(new_sequence(1, range(9), [3, 4, 5]),))
    scheduler.step(block_table_updates=(BlockTableUpdate(1, 3, tokens([6])),))
    assert list(scheduler.session.sequences[1].block_ids) == [3, 4, 5, 6]
    scheduler.step(block_table_updates=(BlockTableUpdate(1, 1, tokens([8])),))
    assert list(scheduler.session.sequences[1].block_ids) == [3, 8]


def test_a_fork_shares_nothing_that_changes(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0, 1], seed=3),))
    scheduler.step((1, 1, True), (2, 1, True), samples=(50, 51), forks=(Fork(1, 2, 4, 3, tokens([9]), index=1),))
    parent, child = scheduler.session.sequences[1], scheduler.session.sequences[2]
    assert list(parent.token_ids) == [5, 6, 7, 42, 50]
    assert list(child.token_ids) == [5, 6, 7, 42, 51]
    assert list(child.block_ids) == [9]
    assert (child.sampling.seed, child.sampling.index, child.num_prompt_tokens) == (3, 1, 3)


def test_a_fork_goes_on_with_tokens_of_its_own_instead_of_what_its_parent_sampled(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0]),))
    fork = Fork(1, 2, 3, 3, tokens([0]), index=0, token_ids=tokens([50]))
    scheduler.step((2, 1, True), samples=(8,), forks=(fork,), finished=(1,))
    assert list(scheduler.session.sequences[2].token_ids) == [5, 6, 7, 50, 8]


def test_a_parent_may_finish_in_the_step_that_forks_it(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0]),))
    scheduler.step((2, 1, True), samples=(8,), forks=(Fork(1, 2, 4, 3, tokens([0]), index=0),), finished=(1,))
    assert list(scheduler.session.sequences) == [2]


def test_a_preempted_sequence_comes_back_as_a_new_one(scheduler: Scheduler) -> None:
    scheduler.step((1, 2, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6], [0]),))
    scheduler.step(preempted=(1,))
    (chunk,) = scheduler.step(
        (1, 3, True), samples=(43,), new_sequences=(new_sequence(1, [5, 6, 42], [7], num_prompt_tokens=2),)
    )
    assert (chunk.start, chunk.stop) == (0, 3)


def test_forgetting_is_idempotent(scheduler: Scheduler) -> None:
    scheduler.step(new_sequences=(new_sequence(1, [5], [0]),))
    scheduler.step(preempted=(1,))
    scheduler.step(finished=(1, 99))
    assert not scheduler.session.sequences


@pytest.mark.parametrize(("epoch", "step_id"), [(7, 2), (7, 0), (6, 1), (8, 1)])
def test_a_step_out_of_turn_is_fenced(epoch: int, step_id: int, scheduler: Scheduler) -> None:
    with pytest.raises(FencingError):
        scheduler.session.apply(SchedulerOutput(epoch, step_id))


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown sequence": ({"scheduled": (9, 1, True)}, "sequence 9 is not known"),
    "beyond its tokens": ({"scheduled": (1, 3, False)}, "cannot compute 3 tokens from token 4 on: it has 6"),
    "sampling in the middle": ({"scheduled": (1, 1, True)}, "cannot sample after token 5: it has 6"),
    "table too short": (
        {"scheduled": (1, 1, False), "block_table_updates": (BlockTableUpdate(1, 0, tokens([3])),)},
        "has room for 4 tokens, not for 5",
    ),
    "known already": ({"new_sequences": (new_sequence(1, [5], [0]),)}, "sequence 1 is known already"),
    "more computed than there are": (
        {"new_sequences": (new_sequence(2, [5], [0], num_computed_tokens=2),)},
        "2 computed tokens of 1",
    ),
    "too long": (
        {"scheduled": (2, 129, True), "new_sequences": (new_sequence(2, [5] * 129, range(40)),)},
        "would reach 129 tokens; the limit is 128",
    ),
    "hole in a table": ({"block_table_updates": (BlockTableUpdate(1, 3, tokens([3])),)}, "has 2 entries"),
    "update of the unknown": ({"block_table_updates": (BlockTableUpdate(9, 0, tokens([])),)}, "9 is not known"),
    "fork of the unknown": ({"forks": (Fork(9, 2, 1, 0, tokens([]), 0),)}, "9 is not known"),
    "fork of too much": ({"forks": (Fork(1, 2, 7, 0, tokens([]), 0),)}, "takes 7 tokens of sequence 1"),
    "fork of part of a prompt": ({"forks": (Fork(1, 2, 5, 0, tokens([]), 0),)}, "has 6 prompt tokens"),
    "fork of what is not computed": ({"forks": (Fork(1, 2, 6, 5, tokens([]), 0),)}, "takes 5 computed tokens"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_with_a_sentence(name: str, scheduler: Scheduler) -> None:
    step, sentence = NONSENSE[name]
    scheduler.step((1, 4, False), new_sequences=(new_sequence(1, range(6), [0, 1]),))
    scheduled = (step["scheduled"],) if "scheduled" in step else ()
    with pytest.raises(InvalidStepError, match=sentence):
        scheduler.step(*scheduled, **{key: value for key, value in step.items() if key != "scheduled"})


def test_a_sequence_grows_by_what_was_right_of_its_guesses_and_one_more(scheduler: Scheduler) -> None:
    prompts = (new_sequence(1, [5, 6, 7], [0, 1]), new_sequence(2, [8, 9], [2, 3]))
    scheduler.step((1, 3, True), (2, 2, True), samples=(42, 43), new_sequences=prompts)
    one, _ = scheduler.step(
        (1, 5, True),
        (2, 1, True),
        samples=(50, 60, 44),
        num_tokens=(2, 1),
        num_draft_tokens=(4, 0),
        drafts=(50, 51, 52),
    )
    assert (one.start, one.stop, list(one.drafts)) == (3, 7, [50, 51, 52])
    found = scheduler.session.sequences[1]
    assert list(found.token_ids) == [5, 6, 7, 42, 50, 60]
    assert found.num_computed_tokens == 5
    (chunk,) = scheduler.step((1, 1, True), samples=(61,))
    assert (chunk.start, chunk.stop, list(chunk.token_ids)) == (5, 6, [60])


def test_a_step_that_makes_fewer_guesses_than_it_has_room_for_computes_fewer_tokens(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0, 1]),))
    (room,) = scheduler.session.apply(
        SchedulerOutput(7, 2, sequence_ids=(1,), num_scheduled_tokens=(4,), samples=(True,), num_draft_tokens=(3,))
    )
    assert (room.start, room.stop, len(room.drafts)) == (3, 7, 3)
    none = room.with_drafts(NO_DRAFTS)
    assert (none.start, none.stop, list(none.token_ids)) == (3, 4, [42])
    two = room.with_drafts(tokens([8, 9]))
    assert (two.stop, list(two.token_ids)) == (6, [42, 8, 9])


def test_nothing_runs_ahead_of_guesses(scheduler: Scheduler) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0, 1]),))
    plain = SchedulerOutput(7, 9, sequence_ids=(1,), num_scheduled_tokens=(1,), samples=(True,))
    assert scheduler.session.follows_unseen(plain)
    assert not scheduler.session.follows_unseen(replace(plain, num_scheduled_tokens=(2,), num_draft_tokens=(1,)))
    scheduler.step((1, 2, True), samples=(51,), num_tokens=(1,), num_draft_tokens=(1,), drafts=(50,))
    assert not scheduler.session.follows_unseen(plain)
    scheduler.step((1, 1, True), samples=(52,))
    assert scheduler.session.follows_unseen(plain)


@pytest.mark.parametrize("scheduled", [(1, 2, True), (1, 3, False)], ids=["fewer are computed", "nothing is sampled"])
def test_room_in_which_nothing_could_be_verified_ends_the_session(
    scheduler: Scheduler, scheduled: tuple[int, int, bool]
) -> None:
    scheduler.step((1, 3, True), samples=(42,), new_sequences=(new_sequence(1, [5, 6, 7], [0, 1]),))
    with pytest.raises(InvalidStepError, match="does not go on from its last token"):
        scheduler.step(scheduled, num_draft_tokens=(2,))


POOLED = PoolingParams(PoolingType.MEAN, 4)


@pytest.mark.parametrize(
    ("scheduled", "sampling", "sentence"),
    [
        ((1, 3, True), {}, "sequence 1 samples tokens, and this worker's model is an encoder"),
        ((1, 2, False), {"pooling": POOLED}, "sequence 1 is not computed whole"),
    ],
)
def test_an_encoder_computes_whole_texts_and_samples_nothing(
    scheduled: tuple[int, int, bool], sampling: dict[str, Any], sentence: str
) -> None:
    scheduler = Scheduler()
    scheduler.session = Session(7, replace(LIMITS, num_device_blocks=0))
    with pytest.raises(InvalidStepError, match=sentence):
        scheduler.step(scheduled, new_sequences=(new_sequence(1, [5, 6, 7], [], **sampling),))


def test_an_encoder_needs_no_blocks() -> None:
    scheduler = Scheduler()
    scheduler.session = Session(7, replace(LIMITS, num_device_blocks=0))
    (chunk,) = scheduler.step(
        (1, 3, True), samples=(0,), new_sequences=(new_sequence(1, [5, 6, 7], [], pooling=POOLED),)
    )
    assert chunk.samples
    assert not chunk.chooses


def test_a_step_does_not_run_ahead_of_one_that_reports_vectors(scheduler: Scheduler) -> None:
    scheduler.step((1, 2, False), new_sequences=(new_sequence(1, [5, 6, 7], [0], pooling=POOLED),))
    step = SchedulerOutput(7, 2, sequence_ids=(1,), num_scheduled_tokens=(1,), samples=(True,))
    assert not scheduler.session.follows_unseen(step)
