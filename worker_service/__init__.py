"""A worker: weights, KV memory and the forward pass behind WorkerService.

A worker plans nothing. All state of a worker can be recomputed, because every token and block number belongs to the
scheduler. Losing a worker costs only recomputation.
"""
