"""How far a failure reaches, over real gRPC: one sequence, one session, or the device."""

import weakref
from typing import Any, Never

import grpc
import pytest
import structlog
from message_helpers import new_message
from served_worker import PROMPT, Service, prompt_step

from pagewire.v1 import scheduler_output_pb2 as pb
from worker_service.errors import DeviceLostError
from worker_service.execution.steps.running_step import RunningStep
from worker_service.execution.worker import Worker
from worker_service.serving import open_session


async def test_a_row_of_nan_is_reported_and_its_neighbour_undisturbed(service: Service, worker: Worker) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(10)), new_message(2, PROMPT, range(10, 20))))
    expected = await client.step(sequence_ids=[1, 2])
    await client.close()

    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(10)), new_message(2, PROMPT, range(10, 20))))
    worker.runner.cache_engine.device_blocks[3] = float("nan")
    answer = await client.step(sequence_ids=[1, 2])
    assert list(answer.failed_sequence_ids) == [1]
    assert list(answer.token_ids) == [0, expected.token_ids[1]]
    await client.step(sequence_ids=[2], finished=[1])
    await client.close()


@pytest.mark.parametrize("num_tokens", [9, 13])  # of the prompt's last 13: with the last of them a token is sampled
async def test_a_prompt_without_log_probabilities_fails_alone(
    num_tokens: int, service: Service, worker: Worker
) -> None:
    def prompts() -> dict[str, Any]:
        wanted = {1: 1, 2: 2, 3: None}
        new = [
            new_message(number, PROMPT, range(10 * number, 10 * number + 10), prompt_logprobs=top, logprobs=0)
            for number, top in wanted.items()
        ]
        return {
            "new_sequences": new,
            "sequence_ids": [1, 2, 3],
            "num_scheduled_tokens": [8] * 3,
            "samples": [False] * 3,
        }

    following = {
        "sequence_ids": [1, 2, 3],
        "num_scheduled_tokens": [num_tokens, 13, 13],
        "samples": [num_tokens == 13, True, True],
    }
    client = service.session()
    await client.step(**prompts())
    expected = await client.step(**following)
    assert not expected.failed_sequence_ids
    await client.close()

    client = service.session()
    await client.step(**prompts())
    worker.runner.cache_engine.device_blocks[11] = float("nan")
    answer = await client.step(**following)
    assert list(answer.failed_sequence_ids) == [1]
    assert list(answer.token_ids) == [0] * (num_tokens == 13) + list(expected.token_ids[-2:])
    for found, sound in ((answer.logprobs, expected.logprobs), (answer.prompt_logprobs, expected.prompt_logprobs)):
        assert list(found) == [report for report in sound if report.sequence_id != 1]
    await client.step(sequence_ids=[2, 3], finished=[1])
    await client.close()


@pytest.mark.parametrize(
    ("malformed", "sentence"),
    [
        ({"sequence_ids": [9]}, "sequence 9 is not known"),
        ({"sequence_ids": [1, 1]}, "scheduled twice"),
        ({"sequence_ids": [1], "num_scheduled_tokens": [5]}, "cannot compute 5 tokens"),
        ({"block_table_updates": [pb.BlockTableUpdate(sequence_id=1, block_ids=[64])]}, "beyond the pool of 64"),
        ({"blocks_to_copy": pb.BlockMapping(sources=[1], destinations=[64])}, "blocks_to_copy: destination 64"),
        ({"sequence_ids": [1], "num_scheduled_tokens": [2], "num_draft_tokens": [1]}, "num_draft_tokens"),
    ],
)
async def test_a_malformed_step_ends_the_session_with_a_sentence_and_the_worker_lives(
    malformed: dict[str, Any], sentence: str, service: Service
) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(6))))
    with service.held():
        await client.send(**malformed)
        await client.send()  # steps that were sent ahead are not computed
    code, details = await client.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in details
    following = service.session()
    await following.step()
    await following.close()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("secret path"), grpc.StatusCode.INTERNAL),
        (MemoryError(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RuntimeError("CUDA out of memory. Tried"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_step_that_breaks_ends_its_session_alone(
    failure: Exception, code: grpc.StatusCode, service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    client = service.session()
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner, "launch", fail)
        await client.send()
        found, details = await client.status()
    assert found is code
    assert "secret" not in details
    following = service.session()
    await following.step()
    await following.close()


async def test_what_a_failed_step_held_is_gone_when_the_device_recovers(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        pass

    held: list[weakref.ref[Held]] = []
    left: list[Held | None] = []

    def discard(*_: object) -> Never:
        raise structlog.DropEvent  # the formatter that is not configured here holds on to local variables

    def run_out(*_: object) -> None:
        tensor = Held()
        held.append(weakref.ref(tensor))
        raise MemoryError

    client = service.session()
    monkeypatch.setattr(open_session, "log", structlog.wrap_logger(structlog.PrintLogger(), [discard]))
    monkeypatch.setattr(worker.runner, "launch", run_out)
    monkeypatch.setattr(worker.runner, "recover", lambda: left.append(held[0]()))
    await client.send()
    assert (await client.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert left == [None]


async def test_a_device_that_is_lost_ends_the_session_and_opens_no_other(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def cannot_recover() -> None:
        raise DeviceLostError("CUDA error: device-side assert triggered")

    client = service.session()
    monkeypatch.setattr(worker.runner, "launch", fail)
    monkeypatch.setattr(worker.runner, "recover", cannot_recover)
    await client.send()
    assert await client.status() == (grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
    assert service.servicer.device_lost.is_set()
    following = service.session()
    await following.send()
    assert await following.status() == (grpc.StatusCode.UNAVAILABLE, "the worker's device failed")


async def test_a_device_that_fails_while_it_is_waited_for_ends_the_session_and_opens_no_other(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RunningStep) -> Never:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cannot_recover() -> None:
        raise DeviceLostError("CUDA error: an illegal memory access was encountered")

    client = service.session()
    monkeypatch.setattr(RunningStep, "is_done", fail)
    monkeypatch.setattr(RunningStep, "finish", fail)
    monkeypatch.setattr(worker.runner, "recover", cannot_recover)
    await client.send()
    assert await client.status() == (grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
    assert service.servicer.device_lost.is_set()
