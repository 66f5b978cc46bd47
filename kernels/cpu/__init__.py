"""The operations of a decoder layer and of the sampler in C++, for float32, float16 and bfloat16 in host memory.
`build` compiles csrc/ to one library for each instruction set."""
