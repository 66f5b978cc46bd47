"""The requests of the benchmarks' loads, sending them to a system, and the figures of the answers."""
