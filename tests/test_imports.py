"""Which package may import which: pyproject.toml has the rules."""

import re
import subprocess
import sys
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports


def test_the_engine_needs_no_tokenizer_and_no_torch() -> None:
    """Both take hundreds of MiB, and seconds of a start."""
    script = "import sys, scheduler_service.server; print({'torch', 'transformers', 'tokenizers'} & {*sys.modules})"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"


def test_a_front_end_needs_no_torch_and_no_transformers() -> None:
    """They take 2 seconds of a start, and 126 MiB without torch."""
    script = "import sys, scheduler_service.frontend.server; print({'torch', 'transformers'} & {*sys.modules})"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"


def test_no_import_makes_a_circle_or_leads_upward() -> None:
    rules = Path(__file__).parents[1] / "pyproject.toml"
    assert lint_imports(str(rules), no_cache=True, no_logo=True) == EXIT_STATUS_SUCCESS


def test_every_channel_is_made_where_proxies_are_decided_on() -> None:
    """gRPC and urllib by themselves send calls to this machine to a proxy of the environment."""
    root = Path(__file__).parents[1]
    packages = (
        "bench",
        "pagewire_client",
        "pagewire_command",
        "pagewire_common",
        "scheduler_service",
        "worker_service",
    )
    makers = re.compile(r"grpc\.(aio\.)?(in)?secure_channel\(|\burlopen\(")
    files = (file for package in packages for file in (root / package).rglob("*.py"))
    found = {str(file.relative_to(root)) for file in files if makers.search(file.read_text())}
    assert found == {"pagewire_common/connection/channel.py"}
