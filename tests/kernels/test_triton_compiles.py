"""Every Triton kernel compiles for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_helpers import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="the other tests compile the kernels for the GPU that is here")
def test_kernels_compile_and_fit_into_shared_memory(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A kernel is compiled again when its source, its arguments, its target or Triton is another. With --all-kernels,
    also for compute capability 8.0."""
    cache = pytestconfig.cache.mkdir("triton") if hasattr(pytestconfig, "cache") else tmp_path
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    program = Path(__file__).with_name("compile_for_gpus.py")
    compiles_all = pytestconfig.getoption("--all-kernels", default=False)
    capabilities = ["80", "90"] if compiles_all else ["90"]
    done = subprocess.run(
        [sys.executable, "-W", "error", program, *capabilities],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_90 split decode over a whole context: _merge_splits_kernel" in done.stdout
    assert "sm_90 attention by position {}: 1 kernels, {('wgmma', 'k16')}" in done.stdout
    assert "sm_90 products: 3 kernels, {('wgmma', 'k16')}" in done.stdout
    if compiles_all:
        assert "sm_80 chunk and decode: _paged_attention_kernel" in done.stdout
        assert "sm_80 attention by position {}: 1 kernels, {('mma', 'k16')}" in done.stdout
