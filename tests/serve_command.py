"""`pagewire_client serve` in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from ports import free_address


@dataclass
class ServeCommand:
    address: str
    process: "subprocess.Popen[str]"


@contextmanager
def serve_command(target: str, *options: str, **environment: str) -> Iterator[ServeCommand]:
    """Serves for the block; a SIGTERM ends it."""
    address = free_address()
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewire_client", "serve", "--target", target, "--listen", address, *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stderr is not None
        with process.stderr as words:
            for line in words:
                if "/v1/chat/completions" in line:
                    break
            else:
                pytest.fail(f"serve ended with status {process.wait()}")
            reader = threading.Thread(target=words.read, daemon=True)
            reader.start()
            yield ServeCommand(address, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
            reader.join()
    finally:
        process.kill()
        process.wait()
