"""Benchmarks. If a benchmark compares pagewire with a peer, it measures both in the same run on the same machine."""
