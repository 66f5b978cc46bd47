"""The programs of examples/ in other languages, each built and run against a server with a key and TLS.

A proxy between program and server cuts the first connection in the middle of the stream. make compat runs this; make
test does not, because the builds take minutes.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from certificates import fill
from tiny_model import write_byte_tokenizer, write_tiny_llama

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect

KEY = "a key of examples"
BYTES = 8000
"""Bytes from the server, a third of the stream's, after which the first connection is cut."""
LANGUAGES = {
    "node": (["node", "npm"], [], ["node", "main.mjs"]),
    "go": (["go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"], [], ["build/main"]),
    "java": (
        ["javac", "protoc", "grpc_java_plugin"],
        ["/usr/share/java/grpc-netty.jar"],
        ["java", "-cp", "build/classes:/usr/share/java/*", "Main"],
    ),
    "cpp": (["g++", "protoc", "grpc_cpp_plugin"], ["/usr/include/grpcpp"], ["build/main"]),
    "rust": (["cargo", "protoc"], ["/usr/share/cargo/registry"], ["build/release/main"]),
}
"""By folder: programs and files that a build needs, and the command."""


class CuttingProxy:
    """Forwards connections to a port, and cuts the first after `BYTES` from the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_cut = 0
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._forward, args=(server, client, BYTES), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                sink.sendall(data)
                sent += len(data)
                if most is not None and sent > most and not self.num_cut:
                    self.num_cut += 1
                    break
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose outputs do not end early, and certificates for localhost."""
    folder = tmp_path_factory.mktemp("languages")
    write_byte_tokenizer(folder / "bytes")
    write_tiny_llama(folder / "tiny", folder / "bytes", unlikely=[0, 1, 2], max_position_embeddings=1024)
    fill(folder / "tls", trustme.CA(), "localhost")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWIRE_API_KEY", KEY)
        with LocalServer(
            str(folder / "tiny"),
            scheduler_arguments=["--tls", str(folder / "tls")],
            worker_arguments=["--num-gpu-blocks-override", "256", "--block-size", "8", "--threads", "1"],
        ) as server:
            yield server


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_streams_resumes_and_cancels(language: str, server: LocalServer, folder: Path) -> None:
    programs, files, command = LANGUAGES[language]
    missing = [one for one in programs if shutil.which(one) is None] + [one for one in files if not Path(one).exists()]
    if missing:
        pytest.skip(f"this machine lacks {', '.join(missing)}; examples/README.md names Debian's packages")
    subprocess.run(["make", "-C", ROOT / "examples", language], check=True)
    proxy = CuttingProxy(int(server.target.rpartition(":")[2]))
    environment = os.environ | {
        "PAGEWIRE_TARGET": f"localhost:{proxy.port}",
        "PAGEWIRE_CLIENT_TLS": str(folder / "tls"),
        "PAGEWIRE_CLIENT_API_KEY": KEY,
        "LC_ALL": "C.UTF-8",
    }
    home = ROOT / "examples" / language
    command = [str(home / command[0]) if command[0].startswith("build/") else command[0], *command[1:]]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, timeout=300)
    proxy.close()
    printed, errors = done.stdout.decode(), done.stderr.decode()
    if "does not support ALPN" in errors:
        pytest.skip("this machine's netty has no ALPN with this Java; the program was compiled alone")
    assert done.returncode == 0, errors
    text, _, rest = printed.rpartition("\nseed ")
    seed, *last = rest.split()
    assert (last, proxy.num_cut, errors.count("trying again")) == (["cancelled"], 1, 1), printed + errors
    assert text == asyncio.run(_undisturbed(server, folder, int(seed)))


async def _undisturbed(server: LocalServer, folder: Path, seed: int) -> str:
    target = server.target.replace("127.0.0.1", "localhost")
    async with Client(target, api_key=KEY, tls=folder / "tls") as client:
        sampling = SamplingParams(max_tokens=256, temperature=1, seed=seed)
        return (await collect(client, "Once upon a time", sampling)).outputs[0].text
