"""Computes the times of a transcript's tokens, by cross attention to the audio and dynamic time warping.

Whisper's alignment heads (`alignment_heads` of generation_config.json) attend to the part of the audio in which a token
is spoken. Their attention weights, standardised over tokens and smoothed over the audio, score how well tokens match
parts of the audio. Sources: Radford et al., 2023; transformers; Whisper's own code.

The queries of all chunks are kept until the prompt's last chunk, so the times do not depend on chunk sizes."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.narrow_cache import is_narrow, widened
from pagewire_common.model_files.generation_config import GenerationConfig
from pagewire_common.start_error import StartError
from worker_service.errors import InvalidStepError
from worker_service.session.sequence_state import ScheduledChunk, SequenceState


@dataclass(frozen=True)
class Aligner:
    """heads: alignment heads by layer. filter_width: encoder tokens over which attention weights are smoothed; odd."""

    heads: Mapping[int, list[int]]
    filter_width: int

    @classmethod
    def read(cls, generation: GenerationConfig, config: Any) -> "Aligner | None":
        """None if the generation config lists no heads. Raises StartError if the network lacks a listed head."""
        heads = defaultdict(list)
        for layer, head in generation.keys.get("alignment_heads", []):
            if layer >= config.num_layers or head >= config.num_kv_heads:
                raise StartError(
                    f"{generation.file}: alignment_heads has head {head} of layer {layer}; the decoder has "
                    f"{config.num_layers} layers of {config.num_kv_heads} heads, counted from 0"
                )
            heads[layer].append(head)
        return cls(dict(heads), config.median_filter_width) if heads else None

    def take(self, chunk: ScheduledChunk, queries: Mapping[int, Tensor], cache: Tensor) -> Tensor | None:
        """Store a chunk's queries. After the prompt's last chunk, returns the tokens' times, [1, dimensions] float32,
        in encoder tokens.

        queries: scaled cross-attention queries by layer, [chunk's tokens, num_heads, head_dim]. Raises InvalidStepError
        if this worker has not computed the earlier tokens."""
        sequence = chunk.sequence
        own = torch.cat([queries[layer][:, heads] for layer, heads in self.heads.items()], dim=1).float()
        if chunk.start:
            if not isinstance(sequence.pooled, Tensor):
                raise InvalidStepError(f"sequence {sequence.sequence_id} is aligned, and its first tokens are missing")
            own = torch.cat((sequence.pooled, own))
        sequence.pooled = own
        if not chunk.samples:
            return None
        pooling = sequence.sampling.pooling
        assert pooling is not None
        assert sequence.encoder is not None
        keys = self._keys(sequence.encoder, pooling.num_sound_tokens, cache)
        scores = own[-pooling.dimensions :].transpose(0, 1) @ keys.permute(1, 2, 0)  # [heads, tokens, sound tokens]
        matches = _matches(scores.softmax(dim=-1), self.filter_width)
        return torch.from_numpy(first_columns(-matches.double().cpu().numpy())[None].astype(np.float32))

    def _keys(self, encoder: SequenceState, num_tokens: int, cache: Tensor) -> Tensor:
        """Cross-attention keys of the first `num_tokens` encoder tokens, [num_tokens, alignment heads, head_dim]
        float32."""
        block_size = cache.shape[3]
        table = torch.tensor(encoder.block_ids[: -(-num_tokens // block_size)], device=cache.device)
        found = []
        for layer, heads in self.heads.items():
            blocks = cache[table, layer]
            wide = widened(blocks, torch.float32) if is_narrow(blocks.dtype) else blocks
            found.append(wide[:, 0].flatten(0, 1)[:num_tokens, heads].float())
        return torch.cat(found, dim=1)


def _matches(weights: Tensor, filter_width: int) -> Tensor:
    """Scores, [tokens, sound tokens], from attention weights, [heads, tokens, sound tokens] float32."""
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    # With no deviation over the tokens, all tokens match this part of the audio equally well.
    standard = torch.where(deviation > 0, (weights - mean) / deviation, 0.0)
    margin = filter_width // 2
    if standard.shape[2] > margin:
        padded = functional.pad(standard, (margin, margin), mode="reflect")
        standard = padded.unfold(-1, filter_width, 1).sort()[0][..., margin]
    return standard.mean(dim=0)


def first_columns(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """For each row, the first column on the cheapest path from the first to the last cell.

    costs: shape [rows, columns]. A move goes to the next row, the next column, or both. Of equally cheap moves, the
    next column wins, as in transformers. Sums are float32, one diagonal at a time. A matrix of 450 rows and 1,500
    columns took 77 ms on a busy machine."""
    num_rows, num_columns = costs.shape
    steps = np.full((num_rows + num_columns + 1, num_rows + 1), -1, dtype=np.int8)
    # Costs of the cheapest paths to the cells of the diagonal before the last. On a diagonal, row + column is constant.
    before_last = np.full(num_rows + 1, np.inf, dtype=np.float32)
    last = before_last.copy()
    before_last[0] = 0.0
    for diagonal in range(2, num_rows + num_columns + 1):
        first, stop = max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1
        both, row, column = before_last[first - 1 : stop - 1], last[first - 1 : stop - 1], last[first:stop]
        takes_both, takes_row = (both < row) & (both < column), (row < both) & (row < column)
        rows = np.arange(first, stop)
        reached = np.full(num_rows + 1, np.inf, dtype=np.float32)
        cheapest = np.where(takes_both, both, np.where(takes_row, row, column))
        reached[first:stop] = costs[rows - 1, diagonal - rows - 1] + cheapest
        steps[diagonal, first:stop] = np.where(takes_both, 0, np.where(takes_row, 1, 2))
        before_last, last = last, reached
    found = np.zeros(num_rows, dtype=np.int64)
    row_number, column_number = num_rows, num_columns
    while row_number > 0 and column_number > 0:
        found[row_number - 1] = column_number - 1
        step = steps[row_number + column_number, row_number]
        if step != 2:
            row_number -= 1
        if step != 1:
            column_number -= 1
    return found
