"""The operations a forward pass and a sampler are made of. They depend on torch alone and know no service code.

`reference`, `attention` and `noise` are eager torch: they run on every device and are the oracle for faster kernels.
"""
