"""A worker: weights, KV memory and the forward pass behind WorkerService.

A worker plans nothing and holds no state that cannot be recomputed: every token and block number belongs to the
scheduler. Losing a worker costs a recomputation.
"""
