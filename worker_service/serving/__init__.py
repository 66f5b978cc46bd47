"""WorkerService on its port: the session that owns the worker, the order of its steps, and the start and end of
processes.

`execution` computes the steps.
"""
