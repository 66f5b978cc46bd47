"""The worker: it stores weights and KV memory, and computes forward passes for the scheduler over the gRPC service
WorkerService.

A worker makes no scheduling decision. The scheduler stores every token and every block number, so a worker's KV memory
can be recomputed on any other worker. The loss of a worker costs only the time of recomputation.
"""
