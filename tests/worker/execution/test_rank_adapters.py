"""Whatever adapters come and go between which steps, all ranks hold the same ones in the same slots."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from adapted_worker import random_adapter
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worker_helpers import state

from worker_service.errors import InvalidStepError
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.adapters.rank_adapters import AdapterFollower, abandon, drop, hand_over, hold
from worker_service.loading.adapter import Adapter
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.families import read_decoder
from worker_service.models.decoders.shard import Shard
from worker_service.parallel.ranks import BETWEEN_STEPS, Ranks
from worker_service.session.sequence_state import ScheduledChunk

NETWORK = read_decoder(
    {
        "model_type": "llama",
        "vocab_size": 7,
        "hidden_size": 12,
        "intermediate_size": 5,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "max_position_embeddings": 16,
    }
)
NAMES = "abcd"


class FakeRanks(Ranks):
    """One of two ranks in this process, with what the first has sent and the second has not received."""

    def __init__(self, rank: int, sent: deque[Any]) -> None:
        super().__init__(rank, 2)
        self.sent = sent

    def send(self, epoch: int, message: bytes, drafts: Any = ()) -> None:
        self.sent.append((epoch, message, drafts))

    def receive(self) -> Any:
        return self.sent.popleft()

    def broadcast(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.popleft())

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # a rank that fails would end this process


class TwoRanks:
    """The adapters of both."""

    def __init__(self) -> None:
        sent = deque[Any]()
        room = AdapterRoom(num_slots=2, max_rank=5, max_loaded=8)
        self.ranks = [FakeRanks(rank, sent) for rank in range(2)]
        self.adapters = [
            Adapters(
                Decoder(NETWORK, torch.float32, torch.device("cpu"), ranks),
                room,
                Shard.of(NETWORK, ranks.rank, 2).cuts(NETWORK),
            )
            for ranks in self.ranks
        ]
        self.follower = AdapterFollower(self.ranks[1], self.adapters[1])

    def follow(self) -> None:
        while self.ranks[0].sent:
            epoch, message, _ = self.ranks[1].receive()
            assert epoch == BETWEEN_STEPS
            self.follower.follow(message)

    def bring(self, adapter: Adapter, piece_bytes: int = 200) -> None:
        for piece in adapter.pieces(piece_bytes):
            hand_over(self.ranks[0], piece)
            self.follow()

    def take(self, name: str, adapter: Adapter) -> None:
        self.bring(adapter)
        hold(self.ranks[0], self.adapters[0], name, adapter.part(self.adapters[0].cuts))
        self.follow()

    def drop(self, name: str) -> None:
        drop(self.ranks[0], self.adapters[0], name)
        self.follow()

    def slots(self, names: str) -> list[Any]:
        """What each rank makes of a step of a row for each of these, "-" for the base."""
        sequences = [state([1]) for _ in names]
        for sequence, name in zip(sequences, names, strict=True):
            sequence.adapter = name.strip("-")
        chunks = [ScheduledChunk(sequence, 0, 1, False) for sequence in sequences]

        def of(adapters: Adapters) -> object:
            try:
                return adapters.slots(chunks).tolist()
            except InvalidStepError as error:
                return str(error)

        return [of(adapters) for adapters in self.adapters]

    def added(self, slot: int) -> dict[str, Tensor]:
        """What the adapter in a slot adds to the whole weights, of both ranks' places."""
        found = {name: torch.zeros(shape) for name, shape in self.adapters[0].shapes.items()}
        for adapters in self.adapters:
            for name, place in adapters._places.items():
                weights, cut = place.weights, adapters.cuts[f"{name}.weight"]
                (rows,), rank = cut.rows, int(weights.ranks[slot])
                begin, end = weights.starts[place.part], weights.starts[place.part + 1]
                product = weights.b[slot, :rank, begin:end].T @ weights.a[slot, place.part, :rank]
                found[name][rows.start : rows.stop, cut.columns.start : cut.columns.stop] += product
        return found


def some(seed: int, shapes: Any) -> Adapter:
    """Of some projections, at a rank of its own."""
    chosen = {name: shape for number, (name, shape) in enumerate(shapes.items()) if (number + seed) % 3}
    return Adapter(random_adapter(chosen, 1 + seed % 5, seed))


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["take", "cut off"]), st.sampled_from(NAMES), st.integers(0, 99)),
    st.tuples(st.just("drop"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("step"), st.text("-" + NAMES, min_size=1, max_size=3), st.just(0)),
)


@given(st.lists(EVENTS, max_size=25))
def test_ranks_agree_on_slots_and_on_refusals_whatever_comes_between_steps(events: list[tuple[str, str, int]]) -> None:
    """And together a slot's parts are what the newest adapter of its name adds."""
    both, held = TwoRanks(), dict[str, Adapter]()
    for kind, names, seed in events:
        if kind == "step":
            first, second = both.slots(names)
            assert first == second
            assert isinstance(first, str) == (not set(names) - {"-"} <= held.keys() or len(set(names) - {"-"}) > 2)
            for name, slot in zip(names, first if isinstance(first, list) else (), strict=False):
                added = both.added(slot) if slot >= 0 else {}
                for module, found in added.items():
                    b, a = reversed(held[name].halves.get(module, (torch.zeros(1, 1), torch.zeros(1, 1))))
                    torch.testing.assert_close(found, (b @ a).expand(found.shape))
        elif kind == "drop":
            both.drop(names)
            held.pop(names, None)
        elif kind == "take":
            held[names] = some(seed, both.adapters[0].shapes)
            both.take(names, held[names])
        else:
            both.bring(some(seed, both.adapters[0].shapes))
            abandon(both.ranks[0])
            both.follow()
        assert both.adapters[0]._loaded.keys() == both.adapters[1]._loaded.keys() == held.keys()
        assert both.adapters[0]._slots == both.adapters[1]._slots
        assert not both.follower._coming


def test_ranks_hold_no_more_than_their_parts() -> None:
    both = TwoRanks()
    whole = Adapter(random_adapter(both.adapters[0].shapes, 5, 1))
    both.take("a", whole)
    for rank, adapters in enumerate(both.adapters):
        _, part = adapters._loaded["a"]
        held = {
            half.untyped_storage().data_ptr(): half.untyped_storage().nbytes()
            for pair in part.halves.values()
            for half in pair
        }
        assert sum(held.values()) == part.num_bytes == whole.part(adapters.cuts).num_bytes, rank


def test_one_process_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0, 1)
    monkeypatch.setattr(ranks, "send", lambda *_: pytest.fail("it was sent"))
    adapters = Adapters(Decoder(NETWORK, torch.float32, torch.device("cpu")), AdapterRoom(1, 5, 8))
    hold(ranks, adapters, "a", Adapter({}))
    assert list(adapters._loaded) == ["a"]
    drop(ranks, adapters, "a")
    assert not adapters._loaded
