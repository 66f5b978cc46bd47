"""What all launches share: how many warps a tile gets, and the options that do not differ between kernels."""

OPTIONS = {"enable_fp_fusion": True}
"""Multiply-adds may be fused. It is set explicitly because Triton 3.9 warns that the default will change."""


def num_warps(elements: int) -> int:
    """Warps for a tile: 16 elements a thread, that is two 128-bit loads of a half-precision type, in 1 to 16 warps."""
    return min(16, max(1, elements // 512))
