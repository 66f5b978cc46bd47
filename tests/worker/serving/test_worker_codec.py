"""Messages become the worker's types whole, or are refused with a sentence that names the field."""

from dataclasses import replace
from typing import Any

import pytest
from message_helpers import new_message
from sampler_numbers import BEYOND, OTHERS
from worker_helpers import LIMITS

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import sequence_group_pb2 as group_pb
from worker_service.errors import InvalidStepError
from worker_service.serving.codec.answers import encode_model_output
from worker_service.serving.codec.steps import decode_scheduler_output
from worker_service.session.step import (
    ModelOutput,
    PoolingParams,
    PoolingType,
    SampleLogprobs,
    SequenceVectors,
    StepTiming,
)


def test_empty_columns_mean_one_token_each_and_all_sample() -> None:
    output = decode_scheduler_output(pb.SchedulerOutput(epoch=1, step_id=2, sequence_ids=[4, 5]), LIMITS)
    assert (output.num_scheduled_tokens, output.samples) == ((1, 1), (True, True))


def test_every_sampling_parameter_arrives() -> None:
    sampling: dict[str, Any] = {
        **OTHERS,
        "seed": 2**64 - 1,
        "index": 4,
        "min_tokens": 6,
        "eos_token_ids": [1, 2],
        "logprobs": 0,
        "prompt_logprobs": 5,
        "allowed_token_ids": [7, 8],
    }
    message = new_message(
        1, [5], [0], logit_bias={3: -2.5}, bad_words=[group_pb.TokenSequence(token_ids=[9, 10])], **sampling
    )
    output = decode_scheduler_output(pb.SchedulerOutput(new_sequences=[message]), LIMITS)
    params = output.new_sequences[0].sampling
    for name, value in sampling.items():
        arrived = getattr(params, name)
        assert (list(arrived) if isinstance(value, list) else arrived) == value
    assert params.logit_bias == ((3, -2.5),)
    assert params.bad_words == ((9, 10),)


def test_unset_logprobs_are_none_at_all() -> None:
    output = decode_scheduler_output(pb.SchedulerOutput(new_sequences=[new_message(1, [5], [0])]), LIMITS)
    assert output.new_sequences[0].sampling.logprobs is None
    assert output.new_sequences[0].sampling.prompt_logprobs is None


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "columns of different lengths": ({"sequence_ids": [1], "num_scheduled_tokens": [1, 1]}, "num_scheduled_tokens"),
    "samples of another length": ({"sequence_ids": [1, 2], "samples": [True]}, "samples: 1 entries for 2"),
    "a sequence twice": ({"sequence_ids": [1, 1]}, "scheduled twice"),
    "an empty chunk": ({"sequence_ids": [1], "num_scheduled_tokens": [0]}, "an entry is 0"),
    "too many tokens": ({"sequence_ids": [1], "num_scheduled_tokens": [257]}, "257 tokens; the limit is 256"),
    "too many sequences": ({"sequence_ids": range(17)}, "17 sequences; the limit is 16"),
    "room for drafts of another length": (
        {"sequence_ids": [1, 2], "num_draft_tokens": [0]},
        "num_draft_tokens: 1 entries for 2",
    ),
    "room for drafts": ({"sequence_ids": [1], "num_draft_tokens": [1]}, "room for 1 drafts; this worker verifies"),
    "a block beyond the pool": ({"new_sequences": [new_message(1, [5], [64])]}, "block 64 is beyond the pool of 64"),
    "an updated block beyond": ({"block_table_updates": [pb.BlockTableUpdate(block_ids=[99])]}, "block 99"),
    "a forked block beyond": ({"forks": [pb.Fork(block_ids=[99])]}, "block 99"),
    "swap out to beyond": (
        {"blocks_to_swap_out": pb.BlockMapping(sources=[63], destinations=[8])},
        "blocks_to_swap_out: destination 8 is beyond the pool of 8",
    ),
    "swap in from beyond": (
        {"blocks_to_swap_in": pb.BlockMapping(sources=[8], destinations=[63])},
        "blocks_to_swap_in: source 8",
    ),
    "a lame mapping": ({"blocks_to_copy": pb.BlockMapping(sources=[1, 2], destinations=[3])}, "2 sources for 1"),
    "a destination twice": ({"blocks_to_copy": pb.BlockMapping(sources=[1, 2], destinations=[3, 3])}, "twice"),
    "no tokens": ({"new_sequences": [new_message(1, [], [])]}, "0 prompt tokens of 0"),
    "more prompt than tokens": (
        {"new_sequences": [new_message(1, [5], [], num_prompt_tokens=2)]},
        "2 prompt tokens of 1",
    ),
    "a token beyond": ({"new_sequences": [new_message(1, [131], [])]}, "token 131 is beyond the vocabulary of 131"),
    "an adapter": ({"new_sequences": [pb.NewSequence(adapter_id="x")]}, "adapter_id"),
} | {
    f"{name} {value}": ({"new_sequences": [new_message(1, [5], [], **{name: value})]}, f"{name}")
    for name, value in [
        *BEYOND,
        ("top_k", 2**32),
        ("logprobs", 132),
        ("prompt_logprobs", 132),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {131: 1.0}),
        ("allowed_token_ids", [131]),
        ("eos_token_ids", [131]),
        ("bad_words", [group_pb.TokenSequence(token_ids=[131])]),
    ]
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_steps_are_refused_with_a_sentence(name: str) -> None:
    fields, sentence = MALFORMED[name]
    with pytest.raises(InvalidStepError, match=sentence):
        decode_scheduler_output(pb.SchedulerOutput(epoch=1, step_id=1, **fields), LIMITS)


def test_an_empty_bad_word_is_refused() -> None:
    message = new_message(1, [5], [0], bad_words=[group_pb.TokenSequence()])
    with pytest.raises(InvalidStepError, match="a bad word has no tokens"):
        decode_scheduler_output(pb.SchedulerOutput(new_sequences=[message]), LIMITS)


def test_the_answer_carries_everything() -> None:
    logprobs = SampleLogprobs(4, 2, [1, 2], [-0.5, -1.0], [3])
    output = ModelOutput([6, 0], StepTiming(1, 2, 3, 4), [logprobs], [logprobs], [5], [1, 1], [0, 2], [3, 0])
    message = encode_model_output(9, 8, output)
    expected = pb.SampleLogprobs(sequence_id=4, width=2, token_ids=[1, 2], logprobs=[-0.5, -1.0], ranks=[3])
    assert message == pb.ModelOutput(
        epoch=9,
        step_id=8,
        token_ids=[6, 0],
        logprobs=[expected],
        prompt_logprobs=[expected],
        timing=pb.StepTiming(move_us=1, forward_us=2, sample_us=3, guess_us=4),
        failed_sequence_ids=[5],
        num_tokens=[1, 1],
        num_draft_tokens=[0, 2],
        num_draft_tokens_wanted=[3, 0],
    )


def test_room_for_guesses_arrives_as_long_as_it_is_no_more_than_the_worker_verifies() -> None:
    limits = replace(LIMITS, num_speculative_tokens=3)
    message = pb.SchedulerOutput(sequence_ids=[1, 2], num_scheduled_tokens=[4, 1], num_draft_tokens=[3, 0])
    assert decode_scheduler_output(message, limits).num_draft_tokens == (3, 0)
    message.num_draft_tokens[1] = 4
    with pytest.raises(InvalidStepError, match="room for 4 drafts; this worker verifies up to 3"):
        decode_scheduler_output(message, limits)


def test_a_steady_decode_step_of_256_sequences_is_small() -> None:
    assert pb.SchedulerOutput(epoch=1, step_id=1000, sequence_ids=range(10_000, 10_256)).ByteSize() < 2048


def pooling_message(**changes: Any) -> pb.SchedulerOutput:
    pooling = group_pb.PoolingParams(**{"type": group_pb.POOLING_TYPE_MEAN, "dimensions": 4} | changes)
    return pb.SchedulerOutput(new_sequences=[new_message(1, [5, 6], [0], pooling=pooling)])


POOLS = replace(LIMITS, embedding_size=8, num_labels=2)


def test_what_is_pooled_arrives_and_vectors_are_answered() -> None:
    every = {"normalize": True, "half": True, "num_first_tokens": 1, "num_sound_tokens": 2}
    (new,) = decode_scheduler_output(pooling_message(**every), POOLS).new_sequences
    assert new.sampling.pooling == PoolingParams(PoolingType.MEAN, 4, True, True, 1, 2)
    answer = encode_model_output(1, 2, ModelOutput([0], StepTiming(1, 2, 3), vectors=[SequenceVectors(4, b"abcd")]))
    assert answer.vectors == [pb.SequenceVectors(sequence_id=4, data=b"abcd")]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"type": 0}, "type 0 is not known"),
        ({"type": 9}, "type 9 is not known"),
        ({"dimensions": 0}, "dimensions is 0; this worker's vectors have 8"),
        ({"dimensions": 9}, "dimensions is 9; this worker's vectors have 8"),
        ({"type": group_pb.POOLING_TYPE_SCORE}, "dimensions is 4; this worker's vectors have 2"),
    ],
)
def test_what_cannot_be_pooled_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidStepError, match=sentence):
        decode_scheduler_output(pooling_message(**changes), POOLS)
