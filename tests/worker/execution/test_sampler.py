"""The sampler against a slow and obvious one, and its promises about rows."""

import importlib
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worker_helpers import state, tokens

from kernels.sampling import filters
from kernels.sampling.filters import filter_thresholds
from kernels.sampling.noise import gumbel_noise, row_keys
from worker_service.execution.sampling import sampler
from worker_service.execution.sampling.logit_edits import edit_logits
from worker_service.session.items import PromptItem
from worker_service.session.sequence_state import SequenceState

VOCABULARY = 40


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def edit_slowly(logits: list[float], sequence: SequenceState) -> list[float]:
    """Bans, bias and penalties, one token at a time."""
    params, tokens = sequence.sampling, list(sequence.token_ids)
    output = tokens[sequence.num_prompt_tokens :]
    edited = []
    for token, value in enumerate(logits):
        logit = value
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logit = -math.inf
        for *before, last in params.bad_words:
            if token == last and (not before or tokens[-len(before) :] == before):
                logit = -math.inf
        if len(output) < params.min_tokens and token in params.eos_token_ids:
            logit = -math.inf
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in tokens:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        edited.append(logit)
    return edited


def filter_slowly(logits: list[float], sequence: SequenceState) -> tuple[set[int], bool]:
    """The tokens that temperature's filters let pass, and whether rounding could make it others."""
    params = sequence.sampling
    largest = max(logits)
    weights = {token: math.exp((logit - largest) / params.temperature) for token, logit in enumerate(logits)}
    near = [abs(weight - params.min_p) < 1e-5 for weight in weights.values()]
    alive = {token: weight for token, weight in weights.items() if weight >= params.min_p}
    ordered = sorted(alive, key=lambda token: -logits[token])
    if params.top_k and len(ordered) > params.top_k:
        bound = logits[ordered[params.top_k - 1]]
        ordered = [token for token in ordered if logits[token] >= bound]
    mass = sum(alive[token] for token in ordered)
    kept, before = set(), 0.0
    for token in ordered:
        near.append(params.top_p < 1 and abs(before - params.top_p * mass) < 1e-5)
        if params.top_p == 1 or before < params.top_p * mass:
            kept.add(token)
        before += alive[token]
    return kept, any(near)


def sample_slowly(logits: list[float], sequence: SequenceState) -> int:
    edited = edit_slowly(logits, sequence)
    params = sequence.sampling
    if params.temperature == 0:
        return edited.index(max(edited))
    kept, near = filter_slowly(edited, sequence)
    if near:
        return -1
    key = row_keys(*(torch.tensor([value]) for value in (params.seed, params.index, len(sequence.token_ids))))
    noise = gumbel_noise(key, len(logits))[0].tolist()
    return max(kept, key=lambda token: edited[token] / params.temperature + noise[token])


token = st.integers(0, VOCABULARY - 1)
sequences = st.builds(
    lambda prompt, output, **sampling: state([*prompt, *output], len(prompt), **sampling),
    prompt=st.lists(token, min_size=1, max_size=6),
    output=st.lists(token, max_size=8),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    seed=st.integers(0, 2**62),
    index=st.integers(0, 5),
    min_tokens=st.sampled_from([0, 4]),
    eos_token_ids=st.just((1, 2)),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, 2.0, 30.0]), max_size=3).map(lambda m: tuple(m.items())),
    allowed_token_ids=st.one_of(st.just(()), st.lists(token, min_size=3, max_size=9, unique=True)).map(tokens),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
)


def sample(logits: torch.Tensor, batch: list[SequenceState]) -> tuple[list[int], list[bool]]:
    """The tokens, 0 for those that failed, and which did."""
    found = sampler.sample(logits, batch).tolist()
    return [max(token_id, 0) for token_id in found], [token_id < 0 for token_id in found]


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_tokens_are_those_of_the_obvious_sampler(batch: list[SequenceState], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    found, failed = sample(logits, batch)
    for row, sequence in enumerate(batch):
        edited = edit_slowly(logits[row].tolist(), sequence)
        assert failed[row] == (max(edited) == -math.inf)
        if not failed[row] and (expected := sample_slowly(logits[row].tolist(), sequence)) >= 0:
            assert found[row] == expected


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_logits_are_edited_as_the_obvious_way_edits_them(batch: list[SequenceState], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    expected = [edit_slowly(row.tolist(), sequence) for row, sequence in zip(logits, batch, strict=True)]
    edit_logits(logits, batch)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_filters_keep_the_tokens_that_the_obvious_way_keeps(batch: list[SequenceState], seed: int) -> None:
    batch = [sequence for sequence in batch if sequence.sampling.temperature]
    logits = random_logits(len(batch), seed)
    if not batch:
        return
    temperatures = torch.tensor([sequence.sampling.temperature for sequence in batch])
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures[:, None]
    params = [sequence.sampling for sequence in batch]
    thresholds = filter_thresholds(
        scaled,
        torch.tensor([param.min_p for param in params]),
        torch.tensor([param.top_k for param in params]),
        torch.tensor([param.top_p for param in params]),
    )
    for row, sequence in enumerate(batch):
        expected, near = filter_slowly(logits[row].tolist(), sequence)
        if not near:
            assert set(torch.nonzero(scaled[row] >= thresholds[row]).flatten().tolist()) == expected


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(sequences, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(batch: list[SequenceState], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    together = sample(logits, batch)[0]
    alone = [sample(logits[row : row + 1], [sequence])[0][0] for row, sequence in enumerate(batch)]
    assert together == alone


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.999, "top_k": 30},
        {"top_k": 30},
        {"top_k": 4, "top_p": 0.5, "min_p": 0.01},
    ],
)
def test_looking_at_few_candidates_first_changes_nothing(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = random_logits(200, 1) / 2
    scaled -= scaled.max(dim=-1, keepdim=True).values
    given = {"min_p": 0.0, "top_k": 0, "top_p": 1.0, **sampling}
    limits = [torch.full((200,), given[name]) for name in ("min_p", "top_k", "top_p")]
    expected = filter_thresholds(scaled, *limits)
    monkeypatch.setattr(filters, "_CANDIDATES", 8)
    found = filter_thresholds(scaled, *limits)
    assert torch.equal(scaled >= found[:, None], scaled >= expected[:, None])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCABULARY, dtype=torch.bfloat16)
    logits[:, [7, 3, 30]] = 2.0
    assert sample(logits, [state([5]), state([5], logit_bias=((8, 1.0),))])[0] == [3, 3]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"allowed_token_ids": tokens((3, 4))}])
def test_a_poisoned_row_fails_alone(poison: float, sampling: dict[str, Any]) -> None:
    logits = random_logits(3, 0)
    batch = [state([5], temperature=1.0), state([5], **sampling), state([5])]
    clean = sample(logits, batch)[0]
    logits[1, 17] = poison
    assert sample(logits, batch) == ([clean[0], 0, clean[2]], [False, True, False])


def test_a_row_without_any_possible_token_fails() -> None:
    logits = random_logits(2, 0)
    logits[0] = -math.inf
    batch = [state([5]), state([5], allowed_token_ids=tokens((3,)), bad_words=((3,),), temperature=1.0)]
    assert sample(logits, batch) == ([0, 0], [True, True])


def test_a_row_that_fails_says_whether_its_logits_or_its_parameters_are_the_reason() -> None:
    logits = random_logits(4, 0)
    logits[0, 5] = logits[2, 5] = math.nan
    logits[1, 5] = math.inf
    barred = state([5], allowed_token_ids=tokens((3,)), bad_words=((3,),))
    found = sampler.sample(logits, [state([5]), state([5]), barred, barred]).tolist()
    assert found == [sampler.FAILED, sampler.FAILED, sampler.FAILED, sampler.BARRED]


def test_the_tiniest_temperature_is_greedy() -> None:
    logits = random_logits(50, 0)
    cold = [state([5], temperature=1e-38, seed=seed) for seed in range(50)]
    assert sample(logits, cold)[0] == logits.argmax(-1).tolist()


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(20_000, 3)
    batch = [state([1] * (1 + position % 100), temperature=2.0, seed=position // 100) for position in range(20_000)]
    drawn = torch.tensor(sample(logits, batch)[0]).bincount(minlength=3) / 20_000
    torch.testing.assert_close(drawn, (logits[0] / 2).softmax(-1), atol=0.02, rtol=0)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter runs where no GPU driver is"
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of infinities
@pytest.mark.usefixtures("interpreted")
def test_triton_chooses_the_tokens_that_eager_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [
        state(
            [5, 7, 7, number],
            2,
            temperature=(0.0, 0.7, 2.0)[number % 3],
            top_k=(0, 5)[number % 2],
            top_p=(1.0, 0.8)[number % 4 // 2],
            repetition_penalty=(1.0, 1.3)[number // 6],
            seed=number,
        )
        for number in range(12)
    ]
    logits = random_logits(12, 0)
    logits[11, 0] = math.nan
    expected = sample(logits, batch)
    backend = importlib.import_module("kernels.triton.sampling")
    monkeypatch.setattr(sampler, "sampling_ops_for", lambda device: backend)
    assert sample(logits, batch) == expected


def test_embeddings_of_a_prompt_are_no_tokens_for_penalties_and_bad_words() -> None:
    params = {"repetition_penalty": 2.0, "bad_words": ((0, 7), (5, 8))}
    logits = torch.ones(2, VOCABULARY)
    plain, embedded = state([6, 5, 0], **params), state([6, 5, 0], **params)
    embedded.items = (PromptItem(b"", 2, 3),)
    edit_logits(logits, [plain, embedded])
    assert [plain.token_ids[2], embedded.token_ids[2]] == [0, 0]
    assert logits[:, [0, 5, 6, 7, 8]].tolist() == [[0.5, 0.5, 0.5, -math.inf, 1], [1, 0.5, 0.5, 1, 1]]


EDITING = {"repetition_penalty": 2.0}


@pytest.mark.parametrize(
    "kinds", [[{"temperature": 1.0, "top_p": 0.5}, EDITING], [EDITING | {"temperature": 0.5}, EDITING]]
)
def test_the_logits_are_left_as_they_are_unless_they_may_be_edited(kinds: list[dict[str, Any]]) -> None:
    logits, batch = random_logits(2, 0), [state([5], **kind) for kind in kinds]
    before = logits.clone()
    expected = sampler.sample(logits, batch)
    assert torch.equal(logits, before)
    assert torch.equal(sampler.sample(logits, batch, may_edit=True), expected)
