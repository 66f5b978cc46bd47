"""The operations a forward pass and a sampler are made of. They depend on torch alone and know no service code.

`reference` and `noise` are eager torch: they run on every device and are the oracle of faster kernels, among which
`ops` chooses.
"""
