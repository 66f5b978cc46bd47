"""The networks that a worker can run."""
