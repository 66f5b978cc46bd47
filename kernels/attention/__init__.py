"""The inputs of attention kernels: options, metadata with the block tables of a step, and 8-bit KV caches."""
