"""The operations of a model's forward pass and of the sampler. This package imports no code of the services, and
depends only on torch. The subpackage `triton` also depends on the library triton.

The modules `reference` and `sampling.eager`, and their helpers, are eager torch. Eager torch runs on every device, and
is the oracle with which tests compare the faster kernels. The modules `backends` and `sampling.ops` choose the kernels
for a device.
"""
