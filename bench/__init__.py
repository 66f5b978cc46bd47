"""Benchmarks. Every figure is printed beside a peer's, measured in the same run on the same machine."""
