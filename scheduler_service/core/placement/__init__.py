"""Decides which worker takes a waiting group. `planning` decides what a worker has room for."""
