import pytest

from pagewire.v1 import scheduler_output_pb2 as pb
from scheduler_service.codec import decode_model_output, encode_scheduler_output
from scheduler_service.core import SamplingParams, ScheduledSequence, SchedulerOutput, SequenceGroup
from scheduler_service.core.block_manager import NO_BLOCK
from scheduler_service.core.outputs import BlockTableUpdate, Fork, NewSequence, TokenLogprobs


def test_a_steady_decode_step_of_256_sequences_is_under_2_kb() -> None:
    """One in sixteen sequences gets a new block in every step."""
    group = SequenceGroup("r", [1, 2, 3], SamplingParams(n=256, max_tokens=10))
    output = SchedulerOutput(step_id=1_000_000, scheduled=[ScheduledSequence(s, 1, True) for s in group.sequences])
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
    group = SequenceGroup("r", [1, 2, 3], SamplingParams(max_tokens=1), lora_name="poet")
    new = NewSequence(group.sequences[0], [NO_BLOCK, 4], 2)
    message = encode_scheduler_output(SchedulerOutput(step_id=1, new_sequences=[new]), epoch=1)
    assert list(message.new_sequences[0].block_ids) == [0, 4]
    assert (message.new_sequences[0].lora_name, message.new_sequences[0].num_computed_tokens) == ("poet", 2)


def test_guesses_go_out_and_what_each_sequence_gained_comes_back() -> None:
    message = encode_scheduler_output(SchedulerOutput(step_id=1, draft_tokens={7: [1, 2]}), epoch=1)
    assert list(message.draft_tokens) == [pb.DraftTokens(sequence_id=7, token_ids=[1, 2])]
    answer = decode_model_output(pb.ModelOutput(step_id=1, token_ids=[1, 5, 6], num_tokens=[2, 1]))
    assert (answer.token_ids, answer.num_tokens) == ([1, 5, 6], [2, 1])
    for shares in ([2, 2], [3, 0]):
        with pytest.raises(ValueError, match="3 tokens do not divide into 2 shares"):
            decode_model_output(pb.ModelOutput(token_ids=[1, 5, 6], num_tokens=shares))


def test_logprob_columns_are_cut_into_positions() -> None:
    columns = pb.SampleLogprobs(
        sequence_id=7, width=2, token_ids=[1, 2, 3, 4], logprobs=[-1.0, -0.5, -2.0, -0.25], ranks=[2, 9]
    )
    answer = decode_model_output(pb.ModelOutput(step_id=3, token_ids=[1], prompt_logprobs=[columns]))
    assert answer.prompt_logprobs[7] == [
        TokenLogprobs([1, 2], [-1.0, -0.5], 2),
        TokenLogprobs([3, 4], [-2.0, -0.25], 9),
    ]


@pytest.mark.parametrize(
    "columns",
    [
        pb.SampleLogprobs(width=2, token_ids=[1], logprobs=[0.0], ranks=[1]),
        pb.SampleLogprobs(width=1, token_ids=[1, 2], logprobs=[0.0], ranks=[1]),
        pb.SampleLogprobs(width=0, token_ids=[1], logprobs=[0.0], ranks=[]),
    ],
)
def test_logprob_columns_that_do_not_fit_together_are_refused(columns: pb.SampleLogprobs) -> None:
    with pytest.raises(ValueError, match="different lengths"):
        decode_model_output(pb.ModelOutput(logprobs=[columns]))
