"""WorkerService on its port: the open session, the order of its steps, and the start and end of processes.

The package `execution` computes the steps.
"""
