"""Operations of a forward pass and a sampler. They know no service code and depend on torch alone; the package `triton`
also depends on triton.

`reference`, `sampling.eager` and their helpers are eager torch. They run on every device and are the oracle of the
faster kernels, among which `backends` and `sampling.ops` choose.
"""
