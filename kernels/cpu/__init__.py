"""The operations in compiled C++, for tensors of float32, float16 and bfloat16 in host memory.

`build` compiles csrc/ for every instruction set, `library` finds what this machine can run, `ops` and `sampling` are
what `kernels.backends` and `kernels.sampling.ops` choose for a CPU.
"""
