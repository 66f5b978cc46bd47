"""Benchmarks of a worker's computation: weights, adapters, drafts, and differences from exact results."""
