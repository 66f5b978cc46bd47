"""Benchmarks of the scheduler alone, without workers."""
