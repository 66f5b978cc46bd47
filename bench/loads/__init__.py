"""The requests of a benchmark, their timing, and the figures of their answers."""
