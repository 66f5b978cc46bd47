"""A disk that is full while a scheduler records: the recording ends, in a sentence, and the service goes on."""

import os
from pathlib import Path

import pytest

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
async def test_a_scheduler_that_cannot_record_any_more_says_so_and_serves_on(
    tiny_model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "64",
            "--block-size",
            "8",
            "--threads",
            "1",
            "--swap-space",
            "0",
        ],
        scheduler_arguments=["--record", "/dev/full", "--check-invariants"],
    ) as server:
        async with Client(server.target) as client:
            first, again = [(await collect(client, "a", GREEDY)).outputs[0].token_ids for _ in range(2)]
        assert len(first) == 20
        assert again == first
        assert server.stop() == [0, 0]
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "recording stopped" in line)
    assert '"reason": "No space left on device"' in said
