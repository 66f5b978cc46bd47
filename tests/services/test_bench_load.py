"""`pagewire bench load` against a running server."""

import json
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from pagewire_client import LocalServer


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_a_load_is_counted_and_drawn(
    way: str,
    agent_server: LocalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--target", agent_server.target] if way == "grpc" else ["--http", agent_server.http_url]
    sizes = ["--requests", "5", "--rate", "1000", "--prompt-tokens", "4-9", "--output-tokens", "3"]
    plot = tmp_path / "plot.png"
    monkeypatch.setattr(sys, "argv", ["bench", "load", *where, *sizes, "--plot", str(plot)])
    main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["requests"], figures["output_tokens"]) == (5, 15)
    assert 20 <= figures["prompt_tokens"] <= 45
    assert figures["ttft"]["p50"] <= figures["ttft"]["p99"] <= figures["e2e"]["p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "load", "--target", "127.0.0.1:1", "--requests", "1"])
    with pytest.raises(SystemExit, match="UNAVAILABLE"):
        main()
