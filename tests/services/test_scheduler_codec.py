import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampler_numbers import OTHERS

from pagewire.v1 import scheduler_output_pb2 as pb
from scheduler_service.core import (
    ImagePart,
    ModelOutput,
    PhaseRule,
    PromptItem,
    SamplingParams,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.blocks.tables import NO_BLOCK
from scheduler_service.core.outputs import BlockTableUpdate, Fork, NewSequence, TokenLogprobs
from scheduler_service.core.planning.step import bytes_to_tell
from scheduler_service.wire.codec import decode_model_output, encode_scheduler_output
from scheduler_service.wire.sampling import RequestSampling


def test_a_steady_decode_step_of_256_sequences_is_under_2_kb() -> None:
    """One in sixteen sequences gets a new block in every step."""
    group = SequenceGroup("r", [1, 2, 3], SamplingParams(n=256, max_tokens=10))
    scheduled = [ScheduledSequence(s, 1, True) for s in group.sequences]
    output = SchedulerOutput(step_id=1_000_000, scheduled=scheduled, num_tokens=256, num_samples=256)
    for sequence in group.sequences:
        sequence.id = 1_000_000 + sequence.index
    for sequence in group.sequences[::16]:
        output.block_table_updates.append(BlockTableUpdate(sequence.id, 30, [9_999]))
    message = encode_scheduler_output(output, epoch=1_700_000_000_000_000_000)
    assert list(message.sequence_ids) == [sequence.id for sequence in group.sequences]
    assert not message.num_scheduled_tokens
    assert not message.samples
    assert message.ByteSize() < 2048


def test_columns_are_written_out_when_a_step_is_not_all_decodes() -> None:
    sequence = SequenceGroup("r", [1, 2, 3], SamplingParams(max_tokens=1)).sequences[0]
    output = SchedulerOutput(step_id=1, scheduled=[ScheduledSequence(sequence, 2, False)], blocks_to_copy=[(3, 4)])
    message = encode_scheduler_output(output, epoch=1)
    assert (list(message.num_scheduled_tokens), list(message.samples)) == ([2], [False])
    assert list(message.blocks_to_copy.sources) == [3]
    assert list(message.blocks_to_copy.destinations) == [4]


def test_a_fork_carries_the_tokens_that_are_not_its_parents() -> None:
    child = SequenceGroup("r", [1, 2, 3, 4], SamplingParams(max_tokens=1)).sequences[0]
    child.id = 9
    message = encode_scheduler_output(SchedulerOutput(step_id=1, forks=[Fork(7, child, 3, [5], 3)]), epoch=1)
    assert message.forks[0] == pb.Fork(
        parent_sequence_id=7, child_sequence_id=9, num_tokens=3, num_computed_tokens=3, block_ids=[5], token_ids=[4]
    )


def test_entries_behind_a_sliding_window_and_adapters_are_written() -> None:
    group = SequenceGroup("r", [1, 2, 3], SamplingParams(max_tokens=1), adapter_id="poet")
    new = NewSequence(group.sequences[0], [NO_BLOCK, 4], 2)
    message = encode_scheduler_output(SchedulerOutput(step_id=1, new_sequences=[new]), epoch=1)
    assert list(message.new_sequences[0].block_ids) == [0, 4]
    assert (message.new_sequences[0].adapter_id, message.new_sequences[0].num_computed_tokens) == ("poet", 2)


def test_an_item_that_the_worker_lacks_is_sent_once_although_it_is_in_two_places() -> None:
    items = (
        PromptItem(b"a", 0, 1, 4, b"data"),
        PromptItem(b"b", 1, 1, 5, b"known"),
        PromptItem(b"a", 2, 1, 4, b"data"),
    )
    group = SequenceGroup("r", [0, 0, 0, 5], SamplingParams(max_tokens=1), items=items)
    new = NewSequence(group.sequences[0], [1], 0, items_sent=frozenset({b"a"}))
    output = SchedulerOutput(step_id=1, new_sequences=[new], dropped_items=[b"c"])
    message = encode_scheduler_output(output, epoch=1)
    assert [(item.start, item.data, item.num_bytes) for item in message.new_sequences[0].items] == [
        (0, b"data", 4),
        (1, b"", 0),
        (2, b"", 0),
    ]
    assert message.dropped_items == [b"c"]


def test_the_parts_of_an_image_are_sent_with_its_data_once() -> None:
    parts = [PromptItem(b"a", start, 1, 4, b"data", ImagePart(8, 6, start)) for start in range(2)]
    group = SequenceGroup("r", [0, 0, 5], SamplingParams(max_tokens=1), items=tuple(parts))
    new = NewSequence(group.sequences[0], [1], 0, items_sent=frozenset({b"a"}))
    names = [part.encoder_item for part in parts]
    output = SchedulerOutput(1, new_sequences=[new], items_to_encode=names, dropped_embeddings=names[1:])
    message = encode_scheduler_output(output, epoch=1)
    first, second = message.new_sequences[0].items
    assert (first.data, first.image) == (b"data", pb.ImagePart(width=8, height=6))
    assert (second.data, second.image) == (b"", pb.ImagePart(width=8, height=6, part=1))
    assert [(item.digest, item.part) for item in message.items_to_encode] == names
    assert [*message.dropped_embeddings] == [pb.EncoderItem(digest=b"a", part=1)]
    answer = decode_model_output(pb.ModelOutput(step_id=1, failed_items=message.items_to_encode))
    assert answer.failed_items == names
    assert not answer.is_plain


def test_room_for_guesses_goes_out_and_what_became_of_it_comes_back() -> None:
    group = SequenceGroup("r", [1], SamplingParams(max_tokens=9, n=2))
    for number, sequence in enumerate(group.sequences, 7):
        sequence.id = number
    scheduled = [ScheduledSequence(sequence, 3 - 2 * sequence.index, True) for sequence in group.sequences]
    output = SchedulerOutput(
        step_id=1, scheduled=scheduled, num_samples=2, num_tokens=2, num_draft_tokens={group.sequences[0]: 2}
    )
    message = encode_scheduler_output(output, epoch=1)
    assert (list(message.num_scheduled_tokens), list(message.num_draft_tokens)) == ([3, 1], [2, 0])
    columns = {"num_draft_tokens": [2, 0], "num_draft_tokens_wanted": [1, 0]}
    answer = decode_model_output(pb.ModelOutput(step_id=1, token_ids=[1, 5, 6], num_tokens=[2, 1], **columns))
    assert (answer.token_ids, answer.num_tokens) == ([1, 5, 6], [2, 1])
    assert (answer.num_draft_tokens, answer.num_draft_tokens_wanted) == ([2, 0], [1, 0])
    for shares in ([2, 2], [2, 0]):
        with pytest.raises(ValueError, match="3 tokens do not divide into 2 counts"):
            decode_model_output(pb.ModelOutput(token_ids=[1, 5, 6], num_tokens=shares))


def test_vectors_that_come_twice_are_refused() -> None:
    vectors = pb.SequenceVectors(sequence_id=3, data=b"abcd")
    assert decode_model_output(pb.ModelOutput(vectors=[vectors])).vectors == {3: b"abcd"}
    with pytest.raises(ValueError, match="vectors of a sequence came twice"):
        decode_model_output(pb.ModelOutput(vectors=[vectors, vectors]))


def test_logprob_columns_are_cut_into_positions() -> None:
    columns = pb.SampleLogprobs(
        sequence_id=7, width=2, token_ids=[1, 2, 3, 4], logprobs=[-1.0, -0.5, -2.0, -0.25], ranks=[2, 9]
    )
    answer = decode_model_output(pb.ModelOutput(step_id=3, token_ids=[1], prompt_logprobs=[columns]))
    assert answer.prompt_logprobs[7] == [
        TokenLogprobs([1, 2], [-1.0, -0.5], 2),
        TokenLogprobs([3, 4], [-2.0, -0.25], 9),
    ]


@pytest.mark.parametrize(("logprob", "fails"), [("nan", True), ("inf", True), ("-inf", False), ("-3e38", False)])
def test_a_prompt_whose_log_probabilities_are_none_fails_alone(logprob: str, fails: bool) -> None:
    reports = [
        pb.SampleLogprobs(sequence_id=number, width=1, token_ids=[1] * 3, logprobs=logprobs, ranks=[1] * 3)
        for number, logprobs in ((7, [-1.0, -float("inf"), float(logprob)]), (8, [-1.0] * 3))
    ]
    answer = decode_model_output(pb.ModelOutput(prompt_logprobs=reports, failed_sequence_ids=[9]))
    assert answer.failed_sequence_ids == {9, 7} - ({7} if not fails else set())


@pytest.mark.parametrize(
    "columns",
    [
        pb.SampleLogprobs(width=2, token_ids=[1], logprobs=[0.0], ranks=[1]),
        pb.SampleLogprobs(width=1, token_ids=[1, 2], logprobs=[0.0], ranks=[1]),
        pb.SampleLogprobs(width=0, token_ids=[1], logprobs=[0.0], ranks=[]),
        pb.SampleLogprobs(width=0, ranks=[1, 2]),
    ],
)
def test_logprob_columns_that_do_not_fit_together_are_refused(columns: pb.SampleLogprobs) -> None:
    with pytest.raises(ValueError, match=r"different lengths|2 positions of 0"):
        decode_model_output(pb.ModelOutput(logprobs=[columns]))


@given(st.data())
def test_no_sequence_takes_more_bytes_on_the_wire_than_the_core_counts(data: st.DataObject) -> None:
    """Protobuf is the oracle, for a sequence that is sent whole, as a fork, and whose table is sent again."""
    number = st.one_of(st.integers(0, 2**32 - 1), st.just(2**32 - 1))
    numbers = st.lists(number, max_size=30)
    group = SequenceGroup(
        "r",
        data.draw(st.lists(number, min_size=1, max_size=30)),
        RequestSampling(
            **OTHERS | {"top_k": 2**32 - 1},
            max_tokens=1,
            n=2,
            seed=2**64 - 1,
            min_tokens=2**32 - 1,
            eos_token_ids=frozenset(data.draw(numbers)),
            stop_token_ids=frozenset(data.draw(numbers)),
            logprobs=20,
            prompt_logprobs=20,
            logit_bias=dict.fromkeys(data.draw(numbers), 0.5),
            allowed_token_ids=tuple(data.draw(numbers)),
            bad_words=tuple(map(tuple, data.draw(st.lists(numbers, max_size=10)))),
        ),
        adapter_id=data.draw(st.text(max_size=9)),
    )
    leader, follower = group.sequences
    leader.id = follower.id = 2**64 - 1
    tables = [2**32 - 1] * 40
    scheduled = [ScheduledSequence(leader, 2**32 - 1, True)]
    whole = SchedulerOutput(1, scheduled, new_sequences=[NewSequence(leader, tables, 2**32 - 1)])
    empty = encode_scheduler_output(SchedulerOutput(1), epoch=1).ByteSize()
    assert encode_scheduler_output(whole, epoch=1).ByteSize() - empty <= bytes_to_tell(leader, 40)
    leader.is_known = True
    again = SchedulerOutput(1, scheduled, block_table_updates=[BlockTableUpdate(leader.id, 0, tables)])
    assert encode_scheduler_output(again, epoch=1).ByteSize() - empty <= bytes_to_tell(leader, 40)
    follower.output_token_ids.extend(data.draw(numbers))
    follower.forked_from, follower.num_forked_tokens = leader, leader.num_prompt_tokens
    fork = SchedulerOutput(1, scheduled, forks=[Fork(leader.id, follower, leader.num_prompt_tokens, tables, 2**32 - 1)])
    assert encode_scheduler_output(fork, epoch=1).ByteSize() - empty <= bytes_to_tell(follower, 40)


@pytest.mark.parametrize("what", ["long cached prompts", "allowed tokens", "followers without their leader"])
def test_no_step_comes_near_the_largest_message(what: str) -> None:
    """In one message they would be more than 64 MiB."""
    config = SchedulerConfig(
        block_size=64,
        num_device_blocks=4_000,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_model_len=1 << 17,
        phase_rule=PhaseRule.SEPARATE,
    )
    scheduler = Scheduler(config, WaitingQueue())
    num_groups, length, n = {
        "long cached prompts": (140, 100_000, 1),
        "allowed tokens": (90, 100, 1),
        "followers without their leader": (1, 100, 90),
    }[what]
    allowed = () if what == "long cached prompts" else tuple(range(1 << 18))
    prompt = list(range(1 << 31, (1 << 31) + length))
    sampling = SamplingParams(max_tokens=3, n=n, allowed_token_ids=allowed)
    groups = [SequenceGroup(str(number), prompt, sampling) for number in range(num_groups)]
    for group in groups:
        scheduler.add_request(group)
    total = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        size = encode_scheduler_output(output, epoch=1).ByteSize()
        assert size < 12 << 20
        total += size
        scheduler.update_from_output(output, ModelOutput(output.step_id, [7] * output.num_samples))
        if n > 1 and output.step_id == 1:  # a step of another prompt, and the worker forgets the leader meanwhile
            scheduler.finish_sequence(groups[0].sequences[0], SequenceStatus.FINISHED_ABORTED)
            scheduler.add_request(SequenceGroup("another", prompt, SamplingParams(max_tokens=1)))
    assert all(group.is_finished for group in groups)
    assert total > 64 << 20
