"""Serves the gRPC service WorkerService: starts and ends the worker's processes, manages sessions, and determines the
order of steps.

The package `execution` computes the steps.
"""
