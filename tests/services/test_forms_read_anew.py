"""A worker that still reads what an output has written in its form has no token for it: whole systems go on alike."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from scheduler_in_process import InProcess, scheduler
from speculating import num_preemptions, outputs
from worker_in_process import ServedWorker, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client
from worker_service.execution.sampling.form_process import HEAD
from worker_service.execution.steps.model_runner import ModelRunner

FORM = 'start: "[" item ("," item)* "]"\nitem: "true" | "false" | /[0-9]{2}/'
ASKED: list[dict[str, Any]] = [
    {"grammar": FORM, "temperature": 0.9, "seed": 1, "n": 2, "logprobs": 1, "ignore_eos": False},
    {"grammar": FORM, "temperature": 0, "prompt_logprobs": 1, "ignore_eos": False},
    {"regex": "([ab]{3}-[0-9]){20}", "temperature": 1.0, "seed": 2, "ignore_eos": False, "max_tokens": 90},
    {"temperature": 0.7, "seed": 3},
]


def be_late(worker: ServedWorker, monkeypatch: pytest.MonkeyPatch, *, begun_only: bool = True) -> list[int]:
    """Half of what is said of outputs, or of those that have begun, comes later; returns how many, in a list."""
    runner = worker.worker.runner
    assert isinstance(runner, ModelRunner)
    assert runner._forms is not None
    random, begun, num_late = Random(1), deque[bool](), [0]
    send, receive = runner._forms._send, runner._forms._receive

    def noted(reader: Connection, items: Sequence[Any]) -> None:
        send(reader, items)
        begun.clear()
        for item in items:
            is_late = (bool(item.token_ids) or not begun_only) and random.random() < 0.5
            begun.extend(itertools.repeat(is_late, 1 + len(item.drafts)))
            num_late[0] += is_late

    def received(reader: Connection) -> bytes:
        answer = receive(reader)
        return HEAD.pack(0.0, 0, 0, True) if begun.popleft() else answer

    monkeypatch.setattr(runner._forms, "_send", noted)
    monkeypatch.setattr(runner._forms, "_receive", received)
    return num_late


async def ask(one: InProcess) -> list[Any]:
    await one.engine.model()
    async with Client(one.target) as client:
        return await asyncio.gather(*(outputs(client, "abcabcabc" * 4, **sampling) for sampling in ASKED * 2))


@pytest.mark.parametrize("speculative_config", [None, {"method": "ngram"}], ids=["plain", "ngram"])
async def test_outputs_that_are_read_late_are_the_same(
    tiny_model_directory: Path, speculative_config: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log-probabilities and guesses, and where blocks run out meanwhile."""
    async with (
        worker_in_process(tiny_model_directory, forms=True) as worker,
        scheduler(worker.address, model=str(tiny_model_directory)) as one,
    ):
        expected = await ask(one)
    settings = {"forms": True, "num_gpu_blocks_override": 24, "speculative_config": speculative_config}
    async with (
        worker_in_process(tiny_model_directory, **settings) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), preemption_mode="swap") as one,
    ):
        num_late = be_late(worker, monkeypatch)
        assert await ask(one) == expected
        assert num_late[0] > 50
        assert num_preemptions(one) > 0


async def test_an_output_is_resumed_beside_one_that_is_late_and_has_no_token(
    tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session goes on: in it the last token of the prompt is computed again, which the other output begins with."""
    sampling = pb.SamplingParams(regex="[ab]{8}", n=2, temperature=1.0, seed=4, max_tokens=9)
    async with (
        worker_in_process(tiny_model_directory, forms=True) as worker,
        scheduler(worker.address, model=str(tiny_model_directory)) as one,
        grpc.aio.insecure_channel(one.target) as channel,
    ):
        await one.engine.model()

        async def tokens(held: Sequence[int]) -> dict[int, list[int]]:
            resume = pb.ResumeState(outputs=[pb.ResumedOutput(index=1, token_ids=held)], seed=4) if held else None
            request = pb.GenerateRequest(text="abc", sampling=sampling, resume=resume)
            call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")(request.SerializeToString())
            found: dict[int, list[int]] = {0: [], 1: [*held]}
            async for data in call:
                message = pb.GenerateResponse.FromString(data)
                found[message.index] += message.token_ids
            return found

        whole = await tokens(())
        be_late(worker, monkeypatch, begun_only=False)
        for _ in range(6):
            assert await tokens(whole[1][:3]) == whole
        assert one.engine.workers.all[0].num_losses == 0


async def test_a_form_that_takes_too_long_ends_its_request_and_no_other(
    tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is made to seem: the process is killed, and follows the others anew."""
    async with (
        worker_in_process(tiny_model_directory, forms=True) as worker,
        scheduler(worker.address, model=str(tiny_model_directory)) as one,
    ):
        expected = await ask(one)
        runner = worker.worker.runner
        assert isinstance(runner, ModelRunner)
        assert runner._forms is not None
        send, receive, forms = runner._forms._send, runner._forms._receive, deque[str]()

        def noted(reader: Connection, items: Sequence[Any]) -> None:
            send(reader, items)
            forms.clear()
            forms.extend(item.form for item in items for _ in range(1 + len(item.drafts)))

        def received(reader: Connection) -> bytes:
            if "too slow" in forms.popleft():
                raise TimeoutError("it takes too long")
            return receive(reader)

        monkeypatch.setattr(runner._forms, "_send", noted)
        monkeypatch.setattr(runner._forms, "_receive", received)
        beside = asyncio.create_task(ask(one))
        async with Client(one.target, retry_for=0) as client:
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="parsing the form takes too long") as error:
                    await outputs(client, "abc", regex="too slow", ignore_eos=False)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await beside == expected


async def test_a_long_output_of_a_form_is_resumed_where_its_reading_takes_many_steps(
    tiny_model_directory: Path,
) -> None:
    """A list whose form costs more for each further item; its end was streamed elsewhere."""
    grammar = "start: l\ni: /[0-9]/\n" + "".join(
        f"l{one or ''}: i" + "".join(f' | i "," l{other or ""}' for other in range(8)) + "\n" for one in range(8)
    )
    async with (
        worker_in_process(tiny_model_directory, forms=True) as worker,
        scheduler(worker.address, model=str(tiny_model_directory)) as one,
    ):
        await one.engine.model()
        sampling = pb.SamplingParams(grammar=grammar, temperature=1.0, seed=4, max_tokens=50, min_tokens=50)
        async with grpc.aio.insecure_channel(one.target) as channel:

            async def tokens(held: Sequence[int]) -> list[int]:
                resume = pb.ResumeState(outputs=[pb.ResumedOutput(token_ids=held)], seed=4) if held else None
                request = pb.GenerateRequest(text="abc", sampling=sampling, resume=resume)
                call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")(request.SerializeToString())
                return [token async for data in call for token in pb.GenerateResponse.FromString(data).token_ids]

            whole = await tokens(())
            assert len(whole) == 50
            assert await tokens(whole[:-1]) == whole[-1:]
