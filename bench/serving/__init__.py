"""Benchmarks of serving, as clients see it."""
