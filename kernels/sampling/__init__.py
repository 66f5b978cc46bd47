"""From logits to tokens in eager torch, the oracle of faster kernels; `ops` chooses among them."""
