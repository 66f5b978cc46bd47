"""SIGKILL of workers that hold an encoder beside the decoder: streams go on with the tokens of an undisturbed run."""

import asyncio
from pathlib import Path
from typing import Any

from cluster import is_busy
from fleet_helpers import Fleet, Scale
from processes import Workers, scheduler
from tiny_encoder_decoder import write_encoder_decoder

from pagewire_client import Client, EncoderPrompt, SamplingParams
from pagewire_client.llm import collect

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"beam_width": 3},
    {"temperature": 0, "logprobs": 1, "repetition_penalty": 1.2},
]


async def outputs(client: Client, number: int) -> list[tuple[list[int], str]]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **KINDS[number % len(KINDS)])
    completion = await collect(client, EncoderPrompt(f"Text {number}: " + "word " * (number % 14)), params)
    return [(output.token_ids, output.text) for output in completion.outputs]


async def test_what_an_encoder_has_read_on_a_lost_worker_is_read_again_on_another(tmp_path: Path, scale: Scale) -> None:
    for family in ("t5", "bart")[: scale(1, 2)]:
        model = write_encoder_decoder(tmp_path / family, family)
        workers, count = Workers(model), scale(8, 60)
        first, second = workers.up(2)
        member = scheduler(model, [first.address, second.address], "--check-invariants").start()
        try:
            async with Client(member.address, retry_for=0) as client:
                await client.wait_until_serving(60)
                expected = [await outputs(client, number) for number in range(count)]
                fleet = Fleet(member, client, [], {})
                streams = asyncio.gather(*(outputs(client, number) for number in range(count)))
                state = await fleet.until(lambda state: any(map(is_busy, state.workers)))
                busy = {worker.address for worker in state.workers if is_busy(worker)}
                await asyncio.to_thread((first if first.address in busy else second).kill)
                assert await streams == expected
                state = await fleet.check_empty()
                assert sum(worker.num_preemptions for worker in state.workers) > 0  # it was lost with streams
        finally:
            member.kill()
            workers.close()
