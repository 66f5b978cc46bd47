"""From logits to tokens in eager torch, which is the oracle of faster kernels; `ops` chooses among them."""
