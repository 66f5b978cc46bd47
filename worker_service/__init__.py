"""A worker: weights, KV memory and the forward pass behind WorkerService.

It plans nothing and remembers nothing of value: every token and block number belongs to the scheduler, and a worker
that is lost costs a recomputation.
"""
