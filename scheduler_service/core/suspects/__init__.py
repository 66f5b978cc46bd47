"""Decides whether a request causes the loss of workers, and schedules such a request alone.

`planning.worker_groups` returns the requests of a lost worker to the queue.
"""
