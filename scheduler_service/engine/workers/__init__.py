"""The workers' state: the status and counts of each worker, and the time since a worker last accepted requests."""
