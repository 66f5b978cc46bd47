"""Products with weights, including weights of experts and adapters."""
