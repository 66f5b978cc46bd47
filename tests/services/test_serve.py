"""`pagewire_client serve` starts everything, says what to try, and ends when it is told to, behind its answers."""

import http.client
import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from http_requests import CHAT, MODEL
from ports import free_address


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_says_what_to_try_and_ends_behind_an_answer_that_is_under_way(
    tiny_model_directory: Path, number: signal.Signals, status: int
) -> None:
    listen = free_address()
    command = ["serve", str(tiny_model_directory), "--listen", listen, "--grpc-listen", "127.0.0.1:0"]
    process = subprocess.Popen([sys.executable, "-m", "pagewire_client", *command], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        with process.stderr as words:
            said = [next(line for line in words if line.startswith("A page to try is at "))]
            said += [next(words) for _ in range(4)]
            assert said[0].startswith(
                f"A page to try is at http://{listen}; OpenAI's API at http://{listen}/v1; gRPC at 127.0.0.1:"
            )
            assert said[2].startswith(f"curl http://{listen}/v1/chat/completions")
            body = {"model": MODEL, "messages": CHAT, "max_tokens": 300, "ignore_eos": True, "stream": True}
            with closing(http.client.HTTPConnection(listen)) as client:
                client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
                with client.getresponse() as answer:
                    lines = [answer.readline()]
                    process.send_signal(number)
                    lines += answer.readlines()
            assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
            assert json.loads(lines[-4].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
            assert "POST /v1/chat/completions 200, 300 tokens, " in words.read()
        assert process.wait(60) == status
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ConnectionRefusedError), closing(http.client.HTTPConnection(listen)) as client:
        client.connect()
