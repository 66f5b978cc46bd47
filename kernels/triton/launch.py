"""Launch options shared by all kernels, and the number of warps for a tile."""

OPTIONS = {"enable_fp_fusion": True}
"""Launch options that allow fused multiply-adds. The option is explicit because Triton 3.9 warns that the default will
change."""


def num_warps(elements: int) -> int:
    """Number of warps for a tile, 1 to 16. A thread has 16 elements, two 128-bit loads of a half-precision type."""
    return min(16, max(1, elements // 512))
