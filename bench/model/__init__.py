"""Benchmarks of a worker's computation: weights, adapters, drafts, and exactness."""
