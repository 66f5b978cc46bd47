"""The operations a forward pass and a sampler are made of. They know no service code and depend on torch alone; the
package `triton` depends on triton, too.

`reference`, `sampling.eager` and what they are made of are eager torch: they run on every device and are the oracle of
faster kernels, among which `backends` and `sampling.ops` choose.
"""
