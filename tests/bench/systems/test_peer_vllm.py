"""Starting, driving and ending the peer, with a script in its place."""

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.loads.drive import BenchError, drive
from bench.loads.load import CONTEXT, streams
from bench.systems.peer_vllm import Vllm, vllm_on_cpu

SERVER = """
import asyncio, json, os, pathlib, subprocess, sys
from aiohttp import web

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[2], "child").write_text(str(child.pid))

async def complete(request):
    asked = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(asked["max_tokens"]):
        event = {"choices": [{"text": "", "token_ids": [len(asked["prompt"])]}]}
        await response.write(f"data: {json.dumps(event)}\\n\\n".encode())
    await response.write(b"data: [DONE]\\n\\n")
    return response

app = web.Application()
app.router.add_get("/health", lambda request: web.Response())
context = sys.argv[sys.argv.index("--max-model-len") + 1]
version = f"{os.environ['VLLM_CPU_KVCACHE_SPACE']} {context}"
app.router.add_get("/version", lambda request: web.json_response({"version": version}))
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[-1]), print=None)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Callable[[str], Path]:
    def make(source: str) -> Path:
        for folder in ("model", "venv/bin"):
            (tmp_path / folder).mkdir(parents=True)
        script = tmp_path / "venv" / "bin" / "vllm"
        script.write_text(f"#!{sys.executable}\n{source}")
        script.chmod(0o755)
        return tmp_path

    return make


async def test_the_peer_is_driven_over_http_and_leaves_no_process_behind(peer: Callable[[str], Path]) -> None:
    folder = peer(SERVER)
    load = streams(3, 5, concurrency=2, num_requests=4)
    with vllm_on_cpu(folder, cache_gib=3) as vllm:
        assert vllm.version == f"3 {CONTEXT}"
        run = await drive(vllm, load, load.prompts(100, 0))
        child = psutil.Process(int((folder / "model" / "child").read_text()))
        assert child.is_running()
    assert [timeline.output_tokens for timeline in run.timelines] == [5] * 4
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_any_program_can_be_the_peer_with_another_context_and_environment(peer: Callable[[str], Path]) -> None:
    folder = peer(SERVER)
    program = [sys.executable, folder / "venv" / "bin" / "vllm"]
    with Vllm(program, folder / "model", context=99, environment={"VLLM_CPU_KVCACHE_SPACE": "7"}) as vllm:
        assert vllm.version == "7 99"
        assert vllm.environment["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_a_peer_that_does_not_start_says_why(peer: Callable[[str], Path]) -> None:
    with pytest.raises(BenchError, match=r"ended with status 3:\nno such model"):
        vllm_on_cpu(peer("import sys; print('no such model'); sys.exit(3)"), 1)
    with pytest.raises(BenchError, match="cannot be started"):
        vllm_on_cpu(Path("/nowhere"), 1)
