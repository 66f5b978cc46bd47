"""The table of token embeddings. With tensor parallelism, each rank holds the rows of some tokens."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from worker_service.models.layers.linear import Linear
from worker_service.parallel.ranks import Ranks


class Embedding:
    """The embedding layer of a native decoder: a function from token ids to embeddings.

    In most networks, the embedding table is also the weight of the output head. In these networks, embeddings are read
    from the output head's packed weight, so that the table is in memory only once.
    """

    def __init__(self, weight: Tensor, tokens: range, ranks: Ranks) -> None:
        """weight is [rows, hidden_size]. The first rows are the embeddings of the token ids in `tokens`; the remaining
        rows are unused."""
        self.weight = weight
        self._tokens, self._ranks = tokens, ranks
        self._rows: Callable[[Tensor], Tensor] = lambda rows: functional.embedding(rows, self.weight).float()

    def own_rows(self, weight: Tensor) -> Tensor:
        """The rows of `weight` that belong to a token of this rank. `weight` must have the shape of the embedding
        table."""
        return weight[: len(self._tokens)]

    def take_rows_of(self, linear: Linear) -> None:
        """If the packed weight of `linear` allows reading of rows, read embeddings from it from now on, and free the
        embedding table."""
        if (table := linear.table) is not None:
            self._rows = table.rows
            self.weight = self.weight.new_empty(0)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings. token_ids is [num_tokens] int64. Returns [num_tokens, hidden_size] float32."""
        if self._ranks.size == 1:
            return self._rows(token_ids)
        rows = token_ids - self._tokens.start
        elsewhere = (rows < 0) | (rows >= len(self._tokens))
        found = self._rows(rows.masked_fill_(elsewhere, 0))
        return self._ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))
