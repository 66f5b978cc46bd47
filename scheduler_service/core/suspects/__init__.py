"""Decides from losses and seconds whether a request is what workers are lost to, and gives it steps of its own.

The requests of a lost worker wait again by `planning.worker_groups`.
"""
