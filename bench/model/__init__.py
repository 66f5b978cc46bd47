"""Measurements of how a worker computes: weights, adapters, guesses, and exactness."""
