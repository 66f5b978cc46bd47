"""A draft model computes what it has not computed yet, and nothing else, wherever blocks go."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_helpers import state

from pagewire_common.start_error import StartError
from worker_service.execution.drafting.draft_model import DraftModel, with_vocabulary
from worker_service.execution.worker import load_worker
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, BlockMapping, ModelOutput, SchedulerOutput, StepTiming
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Beginning

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 12

Content = tuple[int, ...] | None
"""Of a slot: the tokens that its keys and values depend on."""


class FakeRunner:
    """Remembers what each slot was computed from, and checks that a chunk reads what it should.

    It guesses the number of the tokens so far; sequences in `failing` get nothing. If it reads the next token, what a
    block's last slot was computed from may be how another sequence goes on that shares the block.
    """

    def __init__(self, reads_next: bool = False) -> None:
        self.reads_next = reads_next
        self.device: list[list[Content]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host: list[list[Content]] = [[None] * BLOCK_SIZE for _ in range(NUM_HOST_BLOCKS)]
        pools = torch.empty(NUM_BLOCKS, 1, 2, BLOCK_SIZE), torch.empty(NUM_HOST_BLOCKS, 1, 2, BLOCK_SIZE)
        self.cache_engine = SimpleNamespace(device_blocks=pools[0], host_blocks=pools[1], move=self.move)
        self.num_computed = 0
        self.failing: set[int] = set()

    def move(self, output: SchedulerOutput) -> None:
        for mapping, sources, destinations in (
            (output.blocks_to_swap_out, self.device, self.host),
            (output.blocks_to_swap_in, self.host, self.device),
            (output.blocks_to_copy, self.device, self.device),
        ):
            contents = [list(sources[block_id]) for block_id in mapping.sources]
            for block_id, content in zip(mapping.destinations, contents, strict=True):
                destinations[block_id] = content

    def execute(self, _: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        for chunk in chunks:
            tokens = tuple(chunk.sequence.token_ids[: chunk.stop + self.reads_next])
            assert len(tokens) == chunk.stop + self.reads_next
            for position in range(chunk.stop):
                block = self.device[chunk.sequence.block_ids[position // BLOCK_SIZE]]
                wanted = tokens[: position + 1 + self.reads_next]
                if position >= chunk.start:
                    block[position % BLOCK_SIZE] = wanted
                    self.num_computed += 1
                content = block[position % BLOCK_SIZE]
                if self.reads_next and position < chunk.start and (position + 1) % BLOCK_SIZE == 0:
                    assert content is not None
                    assert content[:-1] == wanted[:-1]
                else:
                    assert content == wanted
        sampling = [chunk for chunk in chunks if chunk.samples]
        failed = [chunk.sequence.sequence_id for chunk in sampling if chunk.sequence.sequence_id in self.failing]
        found = [chunk.stop + self.reads_next for chunk in sampling]
        return ModelOutput(found, StepTiming(0, 0, 0), failed_sequence_ids=failed)


def draft_model(runner: FakeRunner, max_model_len: int = 64, max_num_batched_tokens: int = 16) -> DraftModel:
    return DraftModel(runner, max_model_len, max_num_batched_tokens, 1000, reads_next=runner.reads_next)  # type: ignore[arg-type]


@dataclass
class Fleet:
    """Sequences with blocks that are allocated, shared, copied, swapped and freed as a scheduler might."""

    data: Any
    sequences: list[SequenceState] = field(default_factory=list)
    swapped: list[tuple[SequenceState, list[int]]] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    free_host: list[int] = field(default_factory=lambda: list(range(NUM_HOST_BLOCKS)))
    next_id: int = 1

    def draw(self, low: int, high: int) -> int:
        return int(self.data.draw(st.integers(low, high)))

    def choose(self, among: Sequence[Any]) -> Any:
        return among[self.draw(0, len(among) - 1)]

    def release(self, sequence: SequenceState) -> None:
        self.sequences.remove(sequence)
        held = {block_id for other in self.sequences for block_id in other.block_ids}
        self.free = sorted({*self.free, *sequence.block_ids} - held)

    def step(self) -> tuple[SchedulerOutput, list[ScheduledChunk]]:
        """Some moves, and some chunks of what is to be computed then."""
        out, into, copies = BlockMapping(), BlockMapping(), BlockMapping()
        action = self.draw(0, 5)
        if action == 0 and self.sequences:
            sequence = self.choose(self.sequences)
            if len(sequence.block_ids) <= len(self.free_host):
                hosts = [self.free_host.pop() for _ in sequence.block_ids]
                out = BlockMapping(tuple(sequence.block_ids), tuple(hosts))
                self.release(sequence)
                self.swapped.append((sequence, hosts))
        elif action <= 3 and self.swapped and len(self.swapped[0][1]) <= len(self.free):
            sequence, hosts = self.swapped.pop(0)
            sequence.block_ids = array(TOKENS, [self.free.pop(0) for _ in hosts])
            into = BlockMapping(tuple(hosts), tuple(sequence.block_ids))
            self.free_host += hosts
            self.sequences.append(sequence)
        elif action == 1 and self.sequences:
            self.release(self.choose(self.sequences))
        elif action == 2 and self.sequences:
            copies = self.fork(self.choose(self.sequences))
        elif self.free:
            self.add()
        chunks = []
        for sequence in self.sequences:
            start = sequence.num_computed_tokens
            stop = min(len(sequence.token_ids), start + self.draw(0, 6))
            blocks = -(-(stop + 3) // BLOCK_SIZE) - len(sequence.block_ids)
            if stop <= start or blocks > len(self.free):
                continue
            sequence.block_ids.extend(self.free.pop(0) for _ in range(blocks))
            chunks.append(ScheduledChunk(sequence, start, stop, samples=stop == len(sequence.token_ids)))
        output = SchedulerOutput(1, 1, blocks_to_swap_out=out, blocks_to_swap_in=into, blocks_to_copy=copies)
        return output, chunks

    def add(self) -> None:
        """A new sequence, which may begin like another and share the blocks that are full of that."""
        tokens: list[int] = []
        blocks: list[int] = []
        if self.sequences and self.draw(0, 1):
            other = self.choose(self.sequences)
            count = other.num_computed_tokens // BLOCK_SIZE
            tokens, blocks = list(other.token_ids[: count * BLOCK_SIZE]), list(other.block_ids[:count])
        sequence = state(tokens + [self.draw(0, 9) for _ in range(self.draw(1, 12))], sequence_id=self.next_id)
        sequence.num_computed_tokens, sequence.block_ids = len(tokens), array(TOKENS, blocks)
        self.next_id += 1
        self.sequences.append(sequence)

    def fork(self, parent: SequenceState) -> BlockMapping:
        """A child with the computed tokens of its parent and one of its own, and a copy of the last block."""
        count = parent.num_computed_tokens
        if not count or not self.free:
            return BlockMapping()
        child = state([*parent.token_ids[:count], self.draw(0, 9)], sequence_id=self.next_id)
        self.next_id += 1
        child.num_computed_tokens = count
        shared, partial = divmod(count, BLOCK_SIZE)
        child.block_ids = array(TOKENS, parent.block_ids[:shared])
        self.sequences.append(child)
        if not partial:
            return BlockMapping()
        child.block_ids.append(self.free.pop(0))
        return BlockMapping((parent.block_ids[shared],), (child.block_ids[shared],))


@pytest.mark.parametrize("reads_next", [False, True])
@given(st.data())
def test_a_pass_reads_what_was_computed_of_the_same_tokens(reads_next: bool, data: st.DataObject) -> None:
    fleet, runner = Fleet(data), FakeRunner(reads_next)
    model = draft_model(runner)
    for _ in range(fleet.draw(1, 40)):
        output, chunks = fleet.step()
        model.step_begins(output, chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
            if chunk.samples:
                chunk.sequence.token_ids.append(fleet.draw(0, 9))
        if fleet.draw(0, 2):
            beginnings = [
                Beginning(chunk.sequence, chunk.stop + chunk.samples, fleet.draw(0, 3) * chunk.samples)
                for chunk in chunks
            ]
            for one, guesses in zip(beginnings, model.propose(beginnings), strict=True):
                assert len(guesses) <= one.number
                assert guesses == list(range(one.num_tokens, one.num_tokens + len(guesses)))


def computed(model: DraftModel, sequence: SequenceState, start: int, stop: int) -> None:
    """The target computes tokens [start, stop) of it."""
    model.step_begins(SchedulerOutput(1, 1), [ScheduledChunk(sequence, start, stop, samples=True)])


def long_sequence(num_tokens: int, sequence_id: int = 1) -> SequenceState:
    sequence = state(list(range(num_tokens)), sequence_id=sequence_id)
    sequence.block_ids = array(TOKENS, range(12 * (sequence_id - 1), 12 * sequence_id))
    return sequence


def test_what_has_been_computed_is_not_computed_again() -> None:
    runner, sequence = FakeRunner(), long_sequence(12)
    model = draft_model(runner)
    computed(model, sequence, 0, 11)
    assert model.propose([Beginning(sequence, 12, 3)]) == [[12, 13, 14]]
    assert runner.num_computed == 14
    sequence.token_ids.append(50)
    computed(model, sequence, 11, 12)
    assert model.propose([Beginning(sequence, 13, 1)]) == [[13]]
    assert runner.num_computed == 14 + 2  # the token before the last was new to the target, and may be another's slot


def test_it_catches_up_by_no_more_tokens_than_a_step_may_have() -> None:
    runner, first, second = FakeRunner(), long_sequence(40), long_sequence(10, sequence_id=2)
    model = draft_model(runner)
    found = [model.propose([Beginning(first, 40, 1), Beginning(second, 10, 2)]) for _ in range(4)]
    assert found == [[[], []], [[], []], [[40], []], [[40], [10, 11]]]
    assert runner.num_computed == 16 + 16 + 16 + 1 + 2 + 1


def test_a_token_that_reads_the_next_one_is_computed_when_that_is_known() -> None:
    """And the last slot of a block once more when the sequence begins with the next one: it may be another's."""
    runner, sequence = FakeRunner(reads_next=True), long_sequence(12)
    model = draft_model(runner)
    computed(model, sequence, 0, 11)
    assert model.propose([Beginning(sequence, 12, 2)]) == [[12, 13]]
    assert runner.num_computed == 11 + 1
    sequence.token_ids.append(50)
    computed(model, sequence, 11, 12)
    assert model.propose([Beginning(sequence, 13, 1)]) == [[13]]
    assert runner.num_computed == 12 + 1
    sequence.token_ids.append(51)
    computed(model, sequence, 12, 13)
    assert model.propose([Beginning(sequence, 14, 1)]) == [[14]]
    assert runner.num_computed == 13 + 2


def test_no_guess_is_made_beyond_the_models_longest_sequence_or_its_blocks() -> None:
    sequence = long_sequence(10)
    assert draft_model(FakeRunner(), max_model_len=11).propose([Beginning(sequence, 10, 8)]) == [[10, 11]]
    sequence.block_ids = sequence.block_ids[:3]
    assert draft_model(FakeRunner()).propose([Beginning(sequence, 10, 8)]) == [[10, 11, 12]]


def test_a_sequence_that_is_longer_than_the_models_longest_is_not_computed() -> None:
    runner, sequence = FakeRunner(), long_sequence(12)
    assert draft_model(runner, max_model_len=11).propose([Beginning(sequence, 12, 3)]) == [[]]
    assert not runner.num_computed


def test_where_the_model_fails_there_is_no_guess() -> None:
    runner = FakeRunner()
    runner.failing = {2}
    beginnings = [Beginning(long_sequence(5), 5, 2), Beginning(long_sequence(5, sequence_id=2), 5, 2)]
    assert draft_model(runner).propose(beginnings) == [[5, 6], []]


def drafting(model: Path) -> str:
    return json.dumps({"method": "draft_model", "model": str(model)})


def test_a_model_with_another_vocabulary_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    target, other = make_checkpoint(), make_checkpoint()
    words = json.loads((other / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {"t3": 4, "t4": 3}
    (other / "tokenizer.json").write_text(json.dumps(words))
    settings = {"model": str(target), "device": "cpu", "cache": tmp_path, "num_gpu_blocks_override": 8}
    load_worker(WorkerSettings(**settings, speculative_config=drafting(target)))
    with pytest.raises(StartError, match="has another vocabulary than"):
        load_worker(WorkerSettings(**settings, speculative_config=drafting(other)))


def test_a_draft_model_is_refused_where_blocks_behind_a_sliding_window_are_given_back(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    target = make_checkpoint("mistral", sliding_window=20)
    settings = {"model": str(target), "device": "cpu", "cache": tmp_path, "num_gpu_blocks_override": 8}
    with pytest.raises(StartError, match="sliding window"):
        load_worker(WorkerSettings(**settings, speculative_config=drafting(target)))
    load_worker(WorkerSettings(**settings, speculative_config=drafting(target), max_model_len=20))


@pytest.mark.parametrize("size", [3, 5, 9])
def test_a_network_has_the_logits_of_another_vocabulary(size: int) -> None:
    class Echo:
        config = SimpleNamespace(vocabulary_size=5)

        def forward(self, token_ids: torch.Tensor, *_: Any) -> torch.Tensor:
            return token_ids

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.eye(5)[hidden]

    model = with_vocabulary(Echo(), size)  # type: ignore[arg-type]
    ids = torch.tensor([2, 4, 8])
    hidden = model.forward(ids.clamp(max=size - 1), *[None] * 4)  # type: ignore[arg-type]
    logits = model.compute_logits(hidden)
    assert logits.shape == (3, size)
    assert logits.argmax(-1)[0] == 2
    assert torch.isneginf(logits[:, 5:]).all()
