"""Requests with one prefix that swap each other out of a small pool, on a real worker: the tokens of each alone."""

import asyncio
from pathlib import Path

import pytest

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.recording.replayer import Replayer

PREFIX = "Everything that these requests say begins with the same nine blocks of it. "
TAILS = [f"{number} {'and so on ' * (number % 3)}" for number in range(8)]


def sampling(number: int) -> SamplingParams:
    """Greedy, drawn, several drawn at once, and beams."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0.8, "seed": number},
        {"n": 2, "temperature": 0.9, "seed": number},
        {"beam_width": 2},
    )
    return SamplingParams(max_tokens=40, ignore_eos=True, **kinds[number % 4])


async def outputs(client: Client, number: int) -> list[list[int]]:
    completion = await collect(client, PREFIX + TAILS[number], sampling(number))
    return [output.token_ids for output in completion.outputs]


WORKER = ["--num-gpu-blocks-override", "40", "--block-size", "8", "--threads", "1", "--swap-space", "0.01"]


async def test_requests_of_one_prefix_that_are_swapped_say_what_they_say_alone(
    tiny_server: LocalServer, tiny_model_directory: Path, tmp_path: Path
) -> None:
    async with Client(tiny_server.target) as client:
        alone = [await outputs(client, number) for number in range(len(TAILS))]
    recording = tmp_path / "recording"
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=WORKER,
        scheduler_arguments=["--preemption-mode", "swap", "--check-invariants", "--record", str(recording)],
    ) as server:
        async with Client(server.target) as client:
            for _ in range(2):  # the second round finds the prefix on both sides
                together = await asyncio.gather(*(outputs(client, number) for number in range(len(TAILS))))
                assert together == alone
    assert_swapped(recording)


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
async def test_so_they_do_where_weights_are_in_fp8(
    preemption_mode: str, tiny_model_directory: Path, tmp_path: Path
) -> None:
    """Each row of inputs is rounded with a scale of its own, whatever rows are computed beside it."""
    recording = tmp_path / "recording"
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[*WORKER, "--quantization", "fp8", "--dtype", "bfloat16"],
        scheduler_arguments=["--preemption-mode", preemption_mode, "--record", str(recording)],
    ) as server:
        async with Client(server.target) as client:
            alone = [await outputs(client, number) for number in range(len(TAILS))]
            together = await asyncio.gather(*(outputs(client, number) for number in range(len(TAILS))))
            assert together == alone
    if preemption_mode == "swap":
        assert_swapped(recording)


def assert_swapped(recording: Path) -> None:
    steps = [moment.step.output for moment in Replayer().run(recording) if moment.kind == "plan" and moment.step]
    assert any(step.blocks_to_swap_out for step in steps)
    assert any(step.blocks_to_swap_in for step in steps)
