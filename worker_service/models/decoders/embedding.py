"""The table of token embeddings; each rank holds the rows of some tokens."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from worker_service.models.layers.linear import Linear
from worker_service.parallel.ranks import Ranks


class Embedding:
    """The function from token ids to embeddings.

    Most tables are also the weights of the logits. Their packed form is then read in place of a second copy.
    """

    def __init__(self, weight: Tensor, tokens: range, ranks: Ranks) -> None:
        """weight: [rows, hidden_size]; the first rows belong to `tokens`."""
        self.weight = weight
        self._tokens, self._ranks = tokens, ranks
        self._rows: Callable[[Tensor], Tensor] = lambda rows: functional.embedding(rows, self.weight).float()

    def own_rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a weight with the shape of the table."""
        return weight[: len(self._tokens)]

    def take_rows_of(self, linear: Linear) -> None:
        """Read the packed weights of `linear` from now on if their rows can be read, and free the table."""
        if (table := linear.table) is not None:
            self._rows = table.rows
            self.weight = self.weight.new_empty(0)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] int64; returns [num_tokens, hidden_size] float32."""
        if self._ranks.size == 1:
            return self._rows(token_ids)
        rows = token_ids - self._tokens.start
        elsewhere = (rows < 0) | (rows >= len(self._tokens))
        found = self._rows(rows.masked_fill_(elsewhere, 0))
        return self._ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))
