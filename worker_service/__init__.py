"""The worker stores weights and KV memory, and computes forward passes for the scheduler. A worker makes no scheduling
decision. Any other worker can recompute the KV memory, so losing a worker costs only time."""
