"""WorkerService on its port: which session owns the worker, when its steps run, and how its processes start and end.

What a step computes is left to `execution`.
"""
