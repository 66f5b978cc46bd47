"""Launch options shared by all kernels, and the number of warps for a tile."""

OPTIONS = {"enable_fp_fusion": True}
"""Multiply-adds may be fused. Set explicitly because Triton 3.9 warns that the default will change."""


def num_warps(elements: int) -> int:
    """Warps for a tile: 16 elements a thread (two 128-bit loads of a half-precision type), 1 to 16 warps."""
    return min(16, max(1, elements // 512))
