"""The tests of kernels also run alone on a GPU machine that has torch, triton and pytest, and nothing else of ours."""

from importlib.util import find_spec
from pathlib import Path

_NEEDS_HYPOTHESIS = [] if find_spec("hypothesis") else [
    path.name for path in Path(__file__).parent.glob("test_*.py") if "from hypothesis" in path.read_text()
]  # fmt: skip
collect_ignore = _NEEDS_HYPOTHESIS


def pytest_report_header() -> list[str]:
    return [f"left out, because hypothesis is not installed: {', '.join(_NEEDS_HYPOTHESIS)}"] * bool(_NEEDS_HYPOTHESIS)
