"""The workers' state: the status and counts of each worker, and how long no worker has accepted requests."""
