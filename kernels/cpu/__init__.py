"""The operations of a decoder layer and of the sampler in compiled C++, for tensors of float32, float16 and bfloat16 in
host memory.

The module `build` compiles the sources in csrc/ to one library for each instruction set. The module `library` finds the
libraries that this machine can run. If the device is a CPU, `kernels.backends` chooses the module `ops` of this
package, and `kernels.sampling.ops` chooses the module `sampling`.
"""
