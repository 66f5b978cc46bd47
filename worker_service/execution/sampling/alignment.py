"""Computes the times of a transcript's tokens, by cross attention to the audio and dynamic time warping.

Some cross-attention heads of Whisper's decoder attend to the part of the audio in which a token is spoken. The key
`alignment_heads` of generation_config.json lists these heads. The attention weights of these heads are standardised
over the tokens and smoothed over the audio. The resulting scores tell how well each token matches each part of the
audio. Dynamic time warping finds the best path through the matrix of scores. Sources of the algorithm: Radford et al.,
2023; transformers; Whisper's own code.

The times of a prompt are computed at once, after the prompt's last chunk. Until then, the sequence's state stores the
queries of all chunks. The times therefore do not depend on the sizes of the chunks.
"""

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
from worker_service.session.session import ScheduledChunk, SequenceState


@dataclass(frozen=True)
class Aligner:
    """Computes the times at which the tokens of a transcript are spoken. The transcript is sent as a prompt.

    heads: for each layer, the numbers of the alignment heads. filter_width: the number of encoder tokens over which
    attention weights are smoothed, an odd number.
    """

    heads: Mapping[int, list[int]]
    filter_width: int

    @classmethod
    def read(cls, generation: GenerationConfig, config: Any) -> "Aligner | None":
        """The aligner of a model, or None if the generation config lists no heads.

        Raises StartError if the generation config lists a head that the network does not have.
        """
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
        """Store the queries of a chunk of a prompt. After the prompt's last chunk, returns the tokens' times, [1,
        dimensions] float32, in encoder tokens.

        queries: the scaled queries of cross attention in each layer, [chunk's tokens, num_heads, head_dim]. cache: see
        `CausalModel.forward`. Raises InvalidStepError if this worker has not computed the sequence's tokens before the
        chunk.
        """
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
        """Cross-attention keys of the first `num_tokens` encoder tokens, [num_tokens, heads, head_dim] float32. The
        alignment heads are in the order of the field `heads`.
        """
        block_size = cache.shape[3]
        table = torch.tensor(encoder.block_ids[: -(-num_tokens // block_size)], device=cache.device)
        found = []
        for layer, heads in self.heads.items():
            blocks = cache[table, layer]
            wide = widened(blocks, torch.float32) if is_narrow(blocks.dtype) else blocks
            found.append(wide[:, 0].flatten(0, 1)[:num_tokens, heads].float())
        return torch.cat(found, dim=1)


def _matches(weights: Tensor, filter_width: int) -> Tensor:
    """Scores of how well each token matches each part of the audio, [tokens, sound tokens].

    weights: attention weights, [heads, tokens, sound tokens] float32.
    """
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    # If the deviation over the tokens is 0, all tokens match this part of the audio equally well, and their scores are
    # 0.
    standard = torch.where(deviation > 0, (weights - mean) / deviation, 0.0)
    margin = filter_width // 2
    if standard.shape[2] > margin:
        padded = functional.pad(standard, (margin, margin), mode="reflect")
        standard = padded.unfold(-1, filter_width, 1).sort()[0][..., margin]
    return standard.mean(dim=0)


def first_columns(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """For each row of a matrix of costs, the first column on the cheapest path from the first to the last cell of the
    matrix.

    costs: shape [rows, columns]. Each move of the path goes to the next row, to the next column, or to both. If several
    moves cost the same, the path goes to the next column, as in transformers. Sums of costs are float32, and are
    computed one diagonal of the matrix at a time. The sum at a cell needs only the two diagonals before it. A matrix of
    450 rows and 1,500 columns took 77 ms on a busy machine.
    """
    num_rows, num_columns = costs.shape
    steps = np.full((num_rows + num_columns + 1, num_rows + 1), -1, dtype=np.int8)
    # The cost of the cheapest path to each cell of the diagonal before the last one. On a diagonal, row + column is
    # constant.
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
