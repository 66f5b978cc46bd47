"""The server's counts and durations in plain numbers. `operations` converts them for metrics and operators."""
