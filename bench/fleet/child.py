"""Child processes that keep counters, and report them on request as a line of JSON."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.loads.drive import BenchError


async def report(describe: Callable[[], object]) -> None:
    """In the child: write `describe()` as JSON at once, and again for every line on stdin until it ends."""
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while True:
        sys.stdout.write(json.dumps(describe()) + "\n")
        sys.stdout.flush()
        if not await lines.readline():
            return


class Child:
    """A child process, as its parent sees it, from the construction until `close`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._read()

    def ask(self) -> Any:
        """The child's current counters. Raises BenchError if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            raise BenchError(f"{self._module} ended; its last line says why") from None
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"{self._module} ended; its last line says why")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
