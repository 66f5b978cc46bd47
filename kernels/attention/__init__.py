"""The inputs of attention kernels: options, metadata, and 8-bit KV caches."""
