"""What images and wheels install, by pyproject.toml's dependency groups."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def requirements(*groups: str) -> list[str]:
    command = [sys.executable, str(ROOT / "deploy/wheel/requirements.py"), *groups]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_scheduler_needs_no_torch_and_every_requirement_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert "torch" not in requirements("scheduler")
    everything = requirements("scheduler", "worker", "client")
    assert {"torch", "aiohttp", "shtab"} <= set(everything) <= pinned
    assert everything == sorted(set(everything))


def test_the_images_copy_the_build_backend_and_the_command() -> None:
    for service in ("scheduler_service", "worker_service"):
        copied = (ROOT / service / "Dockerfile").read_text()
        assert all(f"COPY {name}" in copied for name in ("deploy/wheel ", "setup.py ", "pagewire_command ", "protos "))
