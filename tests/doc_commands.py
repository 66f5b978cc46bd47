"""Runs the commands of docs/start and docs/operate: `python tests/doc_commands.py` or `make docs-check`.

A comment before a block of commands says what differs: `<!-- not run: REASON -->`, or `<!-- serves: … -->` for a server
that runs in the background until the end of its page. Commands that call it run only here, with the default model.
tests/test_doc_commands.py runs the others.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/operate/*.md")])
START_SECONDS = 600
_BLOCK = re.compile(r"^( *)(?:<!-- (not run|serves): (.*?) -->\n *)?```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: Path
    script: str
    mark: str
    """`not run`, `serves` or empty."""
    reason: str
    calls_server: bool
    """Whether an earlier block of the page serves."""


def blocks(page: Path) -> Iterator[Block]:
    serves = False
    for indent, mark, reason, script in _BLOCK.findall(page.read_text()):
        lines = "".join(line.removeprefix(indent) for line in script.splitlines(keepends=True))
        yield Block(page, lines, mark, reason, serves)
        serves = serves or mark == "serves"


def environment(folder: Path) -> dict[str, str]:
    """Variables of a shell whose `pagewire` and `python` are this checkout's. `folder` gets bin/ and docs/."""
    programs = folder / "bin"
    programs.mkdir()
    for name, command in (("pagewire", "-m pagewire_command"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        program.chmod(0o755)
    (folder / "docs").symlink_to(ROOT / "docs")
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}


def run(script: str, folder: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a block until its first failing command, with all output in `stdout`."""
    return subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=variables, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_page(page: Path) -> bool:
    """Run a page's blocks in their order, and print each. Returns whether all succeeded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables, servers = environment(folder), []
        try:
            for block in blocks(page):
                say(f"{page.relative_to(ROOT)}\n{block.script}")
                if block.mark == "not run":
                    say(f"not run: {block.reason}\n")
                elif block.mark == "serves":
                    servers.append(start(block, folder, variables))
                else:
                    result = run(block.script, folder, variables)
                    say(f"{result.stdout}\n")
                    if result.returncode:
                        say(f"status {result.returncode}\n")
                        return False
        finally:
            for server in servers:
                server.send_signal(signal.SIGINT)
                server.wait()
    return True


def start(block: Block, folder: Path, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a server, and wait until it is ready."""
    server = subprocess.Popen(shlex.split(block.script, comments=True), cwd=folder, env=variables)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen("http://localhost:8000/readiness", timeout=5):
                return server
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    server.kill()
    raise SystemExit(f"{block.script.strip()!r} was not ready within {START_SECONDS} s")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job and its servers ignore it
    failed = [page.name for page in PAGES if not run_page(page)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
