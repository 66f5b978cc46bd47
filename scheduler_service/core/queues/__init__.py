"""Decides the order of waiting requests, and which running group is preempted. `placement` chooses the worker.

Each policy is a class in a separate file. `fair_queue` counts the service of each tenant.
"""
