"""Benchmarks. Every figure is printed next to a peer's figure from the same run on the same machine."""
