"""The table of token embeddings."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from worker_service.models.layers.linear import Linear
from worker_service.parallel.ranks import Ranks


class Embedding:
    """A function from token ids to embeddings. Each rank holds the rows of some tokens. A table tied to the output head
    is read from the head's packed weight, so that it is in memory once."""

    def __init__(self, weight: Tensor, tokens: range, ranks: Ranks) -> None:
        """weight: [rows, hidden_size]; its first rows are for `tokens`, and any others are unused."""
        self.weight = weight
        self._tokens, self._ranks = tokens, ranks
        self._rows: Callable[[Tensor], Tensor] = lambda rows: functional.embedding(rows, self.weight).float()

    def own_rows(self, weight: Tensor) -> Tensor:
        """The rows of `weight` for this rank's tokens. weight: in the table's shape."""
        return weight[: len(self._tokens)]

    def take_rows_of(self, linear: Linear) -> None:
        """If the packed weight of `linear` can be read by rows, use it and free the table."""
        if (table := linear.table) is not None:
            self._rows = table.rows
            self.weight = self.weight.new_empty(0)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] int64. Returns [num_tokens, hidden_size] float32."""
        if self._ranks.size == 1:
            return self._rows(token_ids)
        rows = token_ids - self._tokens.start
        elsewhere = (rows < 0) | (rows >= len(self._tokens))
        found = self._rows(rows.masked_fill_(elsewhere, 0))
        return self._ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))
