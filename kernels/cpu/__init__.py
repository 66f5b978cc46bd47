"""The operations in compiled C++, for tensors of float32, float16 and bfloat16 in host memory.

The module `build` compiles csrc/ for every instruction set. The module `library` finds the libraries that this machine
can run. For a CPU, `kernels.backends` chooses `ops`, and `kernels.sampling.ops` chooses `sampling`.
"""
