"""The operations in compiled C++, for tensors of float32, float16 and bfloat16 in host memory.

`build` compiles csrc/ for every instruction set; `library` finds the libraries that this machine can run.
`kernels.backends` and `kernels.sampling.ops` choose `ops` and `sampling` for a CPU.
"""
