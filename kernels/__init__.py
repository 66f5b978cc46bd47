"""Operations of a forward pass and a sampler. They import no code of the services and depend on torch only. The
subpackage `triton` also depends on the library triton.

`reference`, `sampling.eager` and their helpers are eager torch. They run on every device, and tests compare the faster
kernels with them. `backends` and `sampling.ops` choose the kernels for a device.
"""
