"""Files of a model that both services read."""
