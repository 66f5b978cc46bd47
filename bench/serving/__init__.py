"""Benchmarks of serving, measured by clients."""
