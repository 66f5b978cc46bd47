"""Decides which of the workers that share a queue takes a waiting group; what a worker has room for is planning's."""
