"""The networks that a worker can run, and the readers of their config.json."""
