"""Clients' calls in the engine: admission, waiting limits, and delivery of outputs to front ends."""
