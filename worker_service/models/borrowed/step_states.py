"""The states of a step's sequences in the KV cache, for layers in transformers' code."""

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata
from worker_service.models.causal_model import LayerPlace


class StepStates:
    """See `States`. Operations take the states in the order of the network's layers, and within a layer in the order
    of its operations."""

    def __init__(self, layers: Iterable[LayerPlace]) -> None:
        self._layers = iter(layers)
        self._left: deque[tuple[Tensor, AttentionMetadata]] = deque()

    def begin_layer(self, number: int) -> None: ...

    def short_convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        return ops_for(x.device).short_convolution(_in_rows(x), weight, bias, *self._next(), activation)

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *, normalize: bool
    ) -> Tensor:
        query, key, value = map(_in_rows, (query, key, value))
        states, metadata = self._next()
        ops = ops_for(query.device)
        return ops.gated_delta_rule(query, key, value, decay, beta, states, metadata, normalize)

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        x, b, c = map(_in_rows, (x, b, c))
        return ops_for(x.device).selective_scan(x, dt, a, b, c, d, *self._next())

    def tokens(self) -> Iterator[tuple[int, "_Token"]]:
        states, _, metadata = next(self._layers)
        starts, contexts = metadata.query_start.tolist(), metadata.context_lens.tolist()
        places: dict[str, int] = {}
        for number, block in enumerate(metadata.block_tables[:, 0].tolist()):
            start, stop = starts[number : number + 2]
            for row in range(start, stop):
                is_first = row == start and contexts[number] == stop - start
                yield row, _Token([state[block] for state in states], places, is_first)

    def _next(self) -> tuple[Tensor, AttentionMetadata]:
        if not self._left:
            states, _, metadata = next(self._layers)
            self._left.extend((state, metadata) for state in states)
        return self._left.popleft()


def _in_rows(x: Tensor) -> Tensor:
    """x with each row contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()


class _Token:
    """See `TokenStates`. places: the number of each state, by name, in the order of first uses."""

    def __init__(self, states: list[Tensor], places: dict[str, int], is_first: bool) -> None:
        self._states, self._places, self._is_first = states, places, is_first

    def load(self, name: str) -> Tensor | None:
        state = self._of(name)
        return None if self._is_first else state

    def store(self, name: str, state: Tensor) -> None:
        self._of(name).copy_(state)

    def _of(self, name: str) -> Tensor:
        return self._states[self._places.setdefault(name, len(self._places))]
