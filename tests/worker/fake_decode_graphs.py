"""What CUDA graphs are to a model runner, without a GPU: each kernel is launched anew, over the same inputs.

Steps therefore run ahead of answers on a CPU as they do on a GPU, where tokens that the host has not read yet pass from
one step to the next.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.metadata import AttentionMetadata
from worker_service.execution.decode_inputs import DecodeInputs, UnseenTokens
from worker_service.models.causal_model import CausalModel
from worker_service.session.session import ScheduledChunk


class FakeDecodeGraphs:
    """In the place of `DecodeGraphs`."""

    def __init__(self, model: CausalModel, cache: Tensor, max_num_seqs: int, max_model_len: int) -> None:
        self._model = model
        self._cache = cache
        self._inputs = DecodeInputs(max_num_seqs, max_model_len, cache.shape[3], cache.device)

    def fit(self, chunks: Sequence[ScheduledChunk]) -> bool:
        return all(chunk.stop - chunk.start == 1 for chunk in chunks)

    def forward(self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None) -> Tensor:
        count = len(chunks)
        token_ids, positions, slots, metadata = self._inputs.tensors(self._inputs.fill(chunks, unseen))
        attention = AttentionMetadata(
            metadata.query_start[: count + 1], metadata.context_lens[:count], metadata.block_tables[:count],
            metadata.max_query_len, metadata.max_context_len,
        )  # fmt: skip
        return self._model.forward(token_ids[:count], positions[:count], slots[:count], attention, self._cache)
