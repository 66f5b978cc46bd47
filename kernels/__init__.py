"""Operations of a forward pass and a sampler. The operations import no code of the services and depend on torch only.
The subpackage `triton` also depends on the library triton.

`reference`, `sampling.eager` and their helpers are eager torch. The eager functions run on every device, and are the
oracle with which tests compare the faster kernels. `backends` and `sampling.ops` choose the kernels for a device.
"""
