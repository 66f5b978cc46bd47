"""Products with weights, those of experts and adapters among them."""
