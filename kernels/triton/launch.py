"""Launch options of all Triton kernels."""

OPTIONS = {"enable_fp_fusion": True}
"""Allows fused multiply-adds; explicit, because Triton 3.9 warns that the default will change."""


def num_warps(elements: int) -> int:
    """1 to 16 warps, with 16 elements a thread: two 128-bit loads in half precision."""
    return min(16, max(1, elements // 512))
