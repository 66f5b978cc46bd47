"""Products with weights of linear layers, experts and adapters."""
