"""Vectors are those of the whole prompt's states, however it was cut into chunks and whatever else was in the steps."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepped_worker import PROMPT, SteppedWorker, load_runner
from torch import Tensor
from torch.nn import functional
from worker_helpers import new_sequence

from worker_service.errors import InvalidStepError
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.models.decoders.decoder import Decoder
from worker_service.session.step import TOKENS, Fork, ModelOutput, PoolingParams, PoolingType

SIZE = 48


@pytest.fixture(scope="module")
def states(tiny_checkpoint: Path) -> Tensor:
    """Of PROMPT, as transformers has them: [len(PROMPT), SIZE]."""
    from transformers import AutoModel

    network = AutoModel.from_pretrained(tiny_checkpoint, attn_implementation="eager")
    with torch.inference_mode():
        found: Tensor = network(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0]
    return found


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> ModelRunner:
    return load_runner(tiny_checkpoint)


def pooled(states: Tensor, kind: PoolingType) -> Tensor:
    """The slow way: all states at once."""
    match kind:
        case PoolingType.CLS:
            return states[:1]
        case PoolingType.MEAN:
            return states.double().mean(0, keepdim=True).float()
        case PoolingType.LAST:
            return states[-1:]
    return states


def vectors(answers: Sequence[ModelOutput], sequence_id: int = 1, dtype: str = "<f4") -> Tensor:
    data = b"".join(one.data for answer in answers for one in answer.vectors if one.sequence_id == sequence_id)
    return torch.from_numpy(np.frombuffer(data, dtype).astype(np.float32)).view(-1, SIZE)


def run(
    worker: SteppedWorker, pooling: PoolingParams, chunk_lens: Sequence[int], others: Sequence[Any] = ()
) -> list[ModelOutput]:
    """PROMPT in these chunks; `others` are scheduled beside each of them."""
    new: dict[str, Any] = {"new_sequences": (new_sequence(1, PROMPT, range(20, 32), pooling=pooling),)}
    answers, left = [], len(PROMPT)
    for length in chunk_lens:
        left -= length
        answers.append(worker.step((1, length, not left), *others, **new))
        new = {}
    assert not left
    return answers


@settings(max_examples=60)
@given(
    st.sampled_from([PoolingType.CLS, PoolingType.MEAN, PoolingType.LAST, PoolingType.ALL]),
    st.lists(st.integers(1, 20), max_size=8),
    st.booleans(),
)
def test_any_cut_of_a_prompt_gives_the_vectors_of_the_whole(
    states: Tensor, runner: ModelRunner, kind: PoolingType, chunk_lens: list[int], normalize: bool
) -> None:
    chunks: list[int] = []
    for length in chunk_lens:
        if sum(chunks) + length < len(PROMPT):
            chunks.append(length)
    chunks.append(len(PROMPT) - sum(chunks))
    answers = run(SteppedWorker(runner), PoolingParams(kind, SIZE, normalize), chunks)
    expected = pooled(states, kind)
    if normalize:
        expected = functional.normalize(expected, dim=1)
    torch.testing.assert_close(vectors(answers), expected, rtol=1e-5, atol=1e-5)
    assert [answer.token_ids for answer in answers] == [[]] * (len(chunks) - 1) + [[0]]


def test_sequences_that_sample_and_sequences_that_are_pooled_share_a_step(states: Tensor, runner: ModelRunner) -> None:
    """Neither sees the other."""
    alone = SteppedWorker(runner)
    first = alone.step((2, len(PROMPT), True), new_sequences=(new_sequence(2, PROMPT, range(12)),))
    expected = [*first.token_ids, *alone.generate(2, 4)]
    worker = SteppedWorker(runner)
    found = worker.step((2, len(PROMPT), True), new_sequences=(new_sequence(2, PROMPT, range(12)),)).token_ids
    answers = run(worker, PoolingParams(PoolingType.MEAN, SIZE), [10, 20, 1, 6], [(2, 1, True)])
    # The columns are in the order of the step: what is pooled has a placeholder where it ends.
    assert [*found, *(answer.token_ids[-1] for answer in answers)] == expected
    assert [answer.token_ids[:-1] for answer in answers] == [[], [], [], [0]]
    torch.testing.assert_close(vectors(answers), pooled(states, PoolingType.MEAN), rtol=1e-5, atol=1e-5)


def test_a_vector_is_cut_before_it_is_made_1_long_and_may_have_16_bits(states: Tensor, runner: ModelRunner) -> None:
    params = PoolingParams(PoolingType.LAST, 7, normalize=True, half=True)
    (answer,) = run(SteppedWorker(runner), params, [len(PROMPT)])
    found = np.frombuffer(answer.vectors[0].data, "<f2").astype(np.float32)
    expected = functional.normalize(states[-1, :7], dim=0)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)


def test_a_sequence_without_finite_states_fails_alone(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_runner(tiny_checkpoint)
    assert isinstance(runner.model, Decoder)
    embedding = runner.model.embedding
    monkeypatch.setattr(
        runner.model,
        "_embedding",
        lambda tokens: embedding(tokens).masked_fill((tokens == PROMPT[5])[:, None], float("nan")),
    )
    worker = SteppedWorker(runner)
    pooling = PoolingParams(PoolingType.MEAN, SIZE)
    sound = [token for token in range(20) if token != PROMPT[5]]
    answer = worker.step(
        (1, len(PROMPT), True),
        (2, len(sound), True),
        new_sequences=(
            new_sequence(1, PROMPT, range(20, 32), pooling=pooling),
            new_sequence(2, sound, range(10), pooling=pooling),
        ),
    )
    assert answer.failed_sequence_ids == [1]
    assert [one.sequence_id for one in answer.vectors] == [2]
    too_large = PoolingParams(PoolingType.LAST, SIZE, half=True)
    runner.model._norm.fill_(1e6)  # finite, but not in 16 bits
    answer = worker.step((3, len(sound), True), new_sequences=(new_sequence(3, sound, range(10), pooling=too_large),))
    assert answer.failed_sequence_ids == [3]


def test_what_would_pool_other_states_is_refused(runner: ModelRunner) -> None:
    def begin(kind: PoolingType, num_computed_tokens: int = 0) -> SteppedWorker:
        worker = SteppedWorker(runner)
        new = new_sequence(1, PROMPT, range(20, 32), num_computed_tokens, pooling=PoolingParams(kind, SIZE))
        worker.step((1, 8, False), new_sequences=(new,))
        return worker

    for kind in (PoolingType.MEAN, PoolingType.CLS):
        with pytest.raises(InvalidStepError, match="some of its states are missing"):
            begin(kind, 4)
    begin(PoolingType.LAST, 4)  # of which the last is enough
    worker = begin(PoolingType.LAST)
    with pytest.raises(InvalidStepError, match="has no outputs and cannot be forked"):
        worker.step(forks=(Fork(1, 2, len(PROMPT), 8, array(TOKENS, range(2)), 0),))
    worker = begin(PoolingType.LAST)
    worker.step((1, len(PROMPT) - 8, True))
    with pytest.raises(InvalidStepError, match="has nothing to compute but its prompt"):
        worker.step((1, 1, True))
