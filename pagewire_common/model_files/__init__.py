"""A model's files that both services read."""
