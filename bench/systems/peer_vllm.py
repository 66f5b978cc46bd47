"""Starts vLLM's server with pagewire's weights, and sends loads to its OpenAI-compatible HTTP API.

vLLM has the defaults of `vllm serve`, and settings from the environment, such as VLLM_CPU_OMP_THREADS_BIND. The folder
of its CPU build has a virtual environment `venv/` and a Hugging Face directory `model/`.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from bench.loads.drive import BenchError, Stream
from bench.loads.load import CONTEXT
from pagewire_common.connection.channel import direct_opener

START_SECONDS = 600
STOP_SECONDS = 15
MODEL = "default"


class Vllm:
    """vLLM's server in a separate process group. Raises BenchError if it does not start."""

    name = "vLLM"

    def __init__(
        self,
        program: Sequence[str | Path],
        model: Path,
        *flags: str,
        context: int = CONTEXT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`program` starts `vllm`. `environment` is added to this process's."""
        began = time.perf_counter()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        self.environment |= environment or {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # the log file stays open as long as the server runs
        command: list[str | Path] = [
            *program, "serve", model, "--served-model-name", MODEL, "--dtype", "bfloat16",
            "--max-model-len", str(context), "--host", "127.0.0.1", "--port", str(port), *flags,
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment | {"HF_HUB_OFFLINE": "1"},
                # Ctrl-C ends only the benchmark, which then ends vLLM's process group
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"vLLM cannot be started: {error}") from error
        try:
            self._wait()
            self.version = str(json.loads(self._get("/version"))["version"])
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - began

    def _get(self, path: str) -> bytes:
        with direct_opener().open(self.url + path, timeout=10) as response:
            return bytes(response.read())

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(f"vLLM ended with status {self._process.returncode}:\n{self._last_words()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                self._get("/health")
                return
            time.sleep(0.2)
        raise BenchError(f"vLLM was not ready within {START_SECONDS} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(self._lines()[-20:])

    def _lines(self) -> list[str]:
        log = self._log.fileno()  # vLLM writes at the file's position, which reading must not move
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace").splitlines()

    def sequences_in_cache(self) -> float:
        """How many sequences of the longest context fit the KV cache, as its log says. Raises BenchError if it does
        not."""
        for line in self._lines():
            if found := re.search(r"Maximum concurrency for \S+ tokens per request: ([\d.]+)x", line):
                return float(found[1])
        raise BenchError("vLLM's log does not say how many sequences its KV cache has room for")

    def pids(self) -> list[int]:
        return [self._process.pid]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                async with session.post("/v1/completions", json=_request(prompt, output_tokens)) as response:
                    if response.status != 200:
                        raise BenchError(f"vLLM answered {response.status}: {await response.text()}")
                    async for line in response.content:
                        if tokens := tokens_of(line):
                            yield tokens

            yield stream

    def stop(self) -> None:
        """Send SIGTERM to the server, then SIGKILL to what is left of its process group."""
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:  # also runs if Ctrl-C interrupts the wait for vLLM's end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def vllm_on_cpu(folder: Path, cache_gib: int, *flags: str) -> Vllm:
    """vLLM's CPU build from a folder with `venv/` and `model/`."""
    program, environment = cpu_build(folder, cache_gib)
    return Vllm(program, folder / "model", *flags, environment=environment)


def cpu_build(folder: Path, cache_gib: int) -> tuple[list[Path], dict[str, str]]:
    """The command and environment for vLLM from the folder's virtual environment."""
    return [folder / "venv" / "bin" / "vllm"], {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}


def _request(prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # only with this field, an event contains the number of its tokens
    }


def tokens_of(line: bytes) -> int:
    """Tokens in one line of vLLM's event stream. Raises BenchError if it reports an error."""
    data = line.removeprefix(b"data:").strip()
    if not data or data == b"[DONE]":
        return 0
    event = json.loads(data)
    if "error" in event:
        raise BenchError(f"vLLM answered: {event['error']}")
    return sum(len(choice["token_ids"] or ()) for choice in event["choices"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
