"""A worker: weights, KV memory and the forward pass behind WorkerService.

A worker plans nothing. All its state can be recomputed, because every token and block number belongs to the scheduler.
Losing a worker costs only recomputation.
"""
