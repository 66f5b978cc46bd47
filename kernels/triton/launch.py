"""Launch options of all Triton kernels, and the number of warps with which a kernel is launched."""

OPTIONS = {"enable_fp_fusion": True}
"""Launch options that allow fused multiply-adds. The option is stated explicitly, because Triton 3.9 warns that its
default will change."""


def num_warps(elements: int) -> int:
    """Number of warps for a tile of this many elements, 1 to 16. Each thread gets 16 elements, which are two 128-bit
    loads of a half-precision type."""
    return min(16, max(1, elements // 512))
