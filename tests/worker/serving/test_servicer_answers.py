"""What WorkerService answers over real gRPC: what the worker is, steps in their order, and health while it computes."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from message_helpers import new_message
from served_worker import PROMPT, Gate, Service, prompt_step

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2
from worker_service.execution.steps.running_step import RunningStep
from worker_service.execution.worker import Worker
from worker_service.serving.server import SERVICE_NAME


async def test_nothing_is_served_before_the_model_is_there(loading: Service) -> None:
    for call in (
        loading.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest()),
        loading.stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest()).read(),
        loading.stub.Execute().read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the worker is still loading its model"


async def test_the_worker_says_what_it_is(service: Service, tiny_checkpoint: Path) -> None:
    info = await service.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest())
    assert (info.protocol_version, info.model_id, info.dtype) == (4, tiny_checkpoint.name, "float32")
    assert (info.block_size, info.num_device_blocks, info.vocabulary_size, info.max_model_len) == (4, 64, 131, 128)
    assert info.block_bytes == 3 * 2 * 4 * 2 * 10 * 4
    assert info.num_host_blocks == int(1e-4 * 2**30) // info.block_bytes
    assert info.device.startswith("cpu (")
    assert list(info.features) == ["swap"]
    assert len(info.model_fingerprint) == 64
    assert info.swap_bytes_per_second > 0
    assert info.prefill_tokens_per_second > 0


async def test_the_tokenizer_comes_with_the_worker(service: Service, tiny_checkpoint: Path) -> None:
    received: dict[str, bytes] = {}
    async for piece in service.stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest()):
        received[piece.name] = received.get(piece.name, b"") + piece.data
    assert received["tokenizer.json"] == (tiny_checkpoint / "tokenizer.json").read_bytes()
    assert "config.json" in received


async def test_steps_are_answered_in_order_also_when_sent_ahead(service: Service) -> None:
    client = service.session()
    one_by_one = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    one_by_one += await client.generate(1, 5)
    await client.close()

    ahead = service.session()
    await ahead.send(**prompt_step(new_message(1, PROMPT, range(10))))
    for _ in range(5):
        await ahead.send(sequence_ids=[1])
    answers = [await ahead.call.read() for _ in range(6)]
    assert [answer.step_id for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [answer.token_ids[0] for answer in answers] == one_by_one
    await ahead.close()


async def test_prompts_that_come_beside_decodes_change_no_token_when_steps_are_sent_ahead(service: Service) -> None:
    """Short ones, a part of one, one that reports log-probabilities, and one that is too long for a graph."""

    def steps() -> list[dict[str, Any]]:
        decode = {"num_scheduled_tokens": [1], "samples": [True]}
        first, second = new_message(1, PROMPT, range(12)), new_message(2, PROMPT[3:], range(12, 22))
        third = new_message(3, [*PROMPT, *PROMPT], range(22, 44))
        fourth = new_message(4, PROMPT[5:], range(44, 54), logprobs=1)
        return [
            prompt_step(first),
            {"sequence_ids": [1], **decode},
            _beside([1], second, len(PROMPT) - 10),
            {"sequence_ids": [1, 2], "num_scheduled_tokens": [1, 7], "samples": [True, True]},
            _beside([2, 1], third, 2 * len(PROMPT)),
            _beside([3, 1, 2], fourth, len(PROMPT) - 5),
            {"sequence_ids": [4, 2, 1, 3], "num_scheduled_tokens": [1] * 4, "samples": [True] * 4},
        ]

    client = service.session()
    one_by_one = [list((await client.step(**step)).token_ids) for step in steps()]
    await client.close()
    ahead = service.session()
    for step in steps():
        await ahead.send(**step)
    assert [list((await ahead.call.read()).token_ids) for _ in one_by_one] == one_by_one
    assert [len(step) for step in one_by_one] == [1, 1, 1, 2, 3, 4, 4]
    await ahead.close()


def _beside(decodes: list[int], new: pb.NewSequence, num_tokens: int) -> dict[str, Any]:
    """A step of one token of these sequences and some of a new one's, which samples if they are all."""
    return {
        "new_sequences": [new],
        "sequence_ids": [*decodes, new.sequence_id],
        "num_scheduled_tokens": [*(1 for _ in decodes), num_tokens],
        "samples": [*(True for _ in decodes), num_tokens == len(new.token_ids)],
    }


async def test_a_decode_is_launched_while_the_one_before_it_is_computed(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not worker.runner.runs_ahead:
        pytest.skip("this worker computes one step after the other")
    client = service.session()
    expected = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    expected += await client.generate(1, 2)
    await client.close()

    computed, followed = threading.Event(), threading.Event()
    launch = worker.runner.launch

    def note_and_launch(output: Any, chunks: Sequence[Any], before: Any) -> Any:
        if before is not None:
            followed.set()
        return launch(output, chunks, before)

    monkeypatch.setattr(worker.runner, "launch", note_and_launch)
    monkeypatch.setattr(RunningStep, "is_done", lambda _: computed.is_set())
    computed.set()
    client = service.session()
    found = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    computed.clear()
    await client.send(sequence_ids=[1])
    await client.send(sequence_ids=[1])
    assert await asyncio.to_thread(followed.wait, 60)
    computed.set()
    found += [(await client.call.read()).token_ids[0] for _ in range(2)]
    assert found == expected
    await client.close()


async def test_health_answers_while_a_step_is_computed(service: Service, gate: Gate) -> None:
    await service.server.set_serving(True)
    client = service.session()
    await client.send()
    await gate.wait_until_entered()
    health = health_pb2_grpc.HealthStub(service.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    gate.open.set()
    assert await client.call.read()
    await client.close()


async def test_a_seed_samples_the_same_alone_in_a_batch_and_after_recompute(service: Service) -> None:
    def news(sequence_id: int, first_block: int, **sampling: Any) -> pb.NewSequence:
        return new_message(sequence_id, PROMPT, range(first_block, first_block + 9), **sampling)

    hot = {"temperature": 1.5, "top_p": 0.95, "seed": 2**63 + 7, "index": 2}
    client = service.session()
    alone = list((await client.step(**prompt_step(news(1, 0, **hot)))).token_ids)
    alone += await client.generate(1, 6)
    await client.close()

    client = service.session()
    together = [news(5, 20), news(1, 0, **hot), news(7, 40, temperature=0.8, seed=1)]
    answers = [await client.step(**prompt_step(*together))]
    answers += [await client.step(sequence_ids=[5, 1, 7]) for _ in range(3)]
    found = [answer.token_ids[1] for answer in answers]
    assert found == alone[:4]
    back = new_message(1, PROMPT + found, range(9), num_prompt_tokens=len(PROMPT), **hot)
    found += (await client.step(**prompt_step(back), preempted=[1])).token_ids
    assert found + await client.generate(1, 2) == alone
    await client.close()


async def test_copies_of_a_sequence_diverge_without_touching_each_other(service: Service) -> None:
    """One prefill, a fork, and a copy of the shared last block."""
    client = service.session()
    parent = new_message(1, PROMPT, range(6), temperature=1.5, seed=3, index=0)
    await client.step(**prompt_step(parent))
    fork = pb.Fork(
        parent_sequence_id=1,
        child_sequence_id=2,
        num_tokens=len(PROMPT),
        num_computed_tokens=len(PROMPT) - 1,
        block_ids=[0, 1, 2, 3, 4, 30, 31],
        index=1,
    )
    copy = pb.BlockMapping(sources=[5], destinations=[30])
    both = [await client.step(forks=[fork], blocks_to_copy=copy, sequence_ids=[1, 2])]
    update = pb.BlockTableUpdate(sequence_id=1, start=6, block_ids=[6])
    both += [await client.step(sequence_ids=[1, 2], block_table_updates=[update])]
    both += [await client.step(sequence_ids=[1, 2]) for _ in range(3)]
    child = [answer.token_ids[1] for answer in both]
    assert child != [answer.token_ids[0] for answer in both]
    await client.close()

    client = service.session()
    alone = new_message(2, PROMPT, range(40, 47), temperature=1.5, seed=3, index=1)
    expected = list((await client.step(**prompt_step(alone))).token_ids)
    assert expected + await client.generate(2, 4) == child
    await client.close()


async def test_logprobs_come_with_the_tokens_that_ask(service: Service) -> None:
    client = service.session()
    asks = new_message(1, PROMPT, range(10), logprobs=3, prompt_logprobs=0)
    answer = await client.step(**prompt_step(asks, new_message(2, PROMPT, range(10, 20))))
    (report,) = answer.logprobs
    assert (report.sequence_id, report.width, list(report.ranks)) == (1, 4, [1])
    assert report.token_ids[0] == report.token_ids[1] == answer.token_ids[0]
    (prompt,) = answer.prompt_logprobs
    assert list(prompt.token_ids) == PROMPT[1:]
    await client.close()
