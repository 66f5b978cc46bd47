"""Streams that go on where a broken one stopped: the rest is to the letter what the first would have brought."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import until_idle
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from test_validation import request

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import LocalServer, SamplingParams
from pagewire_common.calls.errors import RequestError
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.calls.generation import check_request
from scheduler_service.frontend.checking.resumption import check_resumption
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import Gained, RequestState
from scheduler_service.frontend.output.streams import Turns
from scheduler_service.statistics.counts import RequestCounts


@dataclass
class Received:
    """What a client has of one output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    last: tuple[int, str | int | None, int, int] | None = None


@dataclass
class Stream:
    """What a client has of one request; a message put in is a message received."""

    outputs: dict[int, Received] = field(default_factory=dict)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    seed: int | None = None
    fingerprint: str = ""

    def put(self, message: pb.GenerateResponse) -> None:
        output = self.outputs.setdefault(message.index, Received())
        assert output.last is None, "a message after the last one"
        output.text += message.text
        output.token_ids += message.token_ids
        output.logprobs += message.logprobs
        self.prompt_logprobs += message.prompt_logprobs
        if message.HasField("seed"):
            self.seed, self.fingerprint = message.seed, message.model_fingerprint
        if message.finish_reason:
            reason = message.WhichOneof("stop_reason")
            usage = message.usage
            output.last = (
                message.finish_reason,
                getattr(message, reason) if reason else None,
                usage.prompt_tokens,
                usage.output_tokens,
            )

    @property
    def resume(self) -> pb.ResumeState:
        return pb.ResumeState(
            seed=self.seed,
            model_fingerprint=self.fingerprint,
            num_prompt_logprobs=len(self.prompt_logprobs),
            outputs=[
                pb.ResumedOutput(index=index, token_ids=output.token_ids, finished=output.last is not None)
                for index, output in self.outputs.items()
            ],
        )

    def assert_like(self, other: "Stream") -> None:
        """The same, but for how sums of log-probabilities are rounded in batches of different sizes."""
        assert self.outputs.keys() == other.outputs.keys()
        for index, output in self.outputs.items():
            mine, theirs = output, other.outputs[index]
            assert (mine.token_ids, mine.text, mine.last) == (theirs.token_ids, theirs.text, theirs.last)
            assert_close(mine.logprobs, theirs.logprobs)
        assert_close(self.prompt_logprobs, other.prompt_logprobs)
        assert (self.seed, self.fingerprint) == (other.seed, other.fingerprint)


def assert_close(mine: list[pb.TokenLogprobs], theirs: list[pb.TokenLogprobs]) -> None:
    assert [entry.chosen.token_id for entry in mine] == [entry.chosen.token_id for entry in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


class Caller:
    """Calls a server without pagewire_client, as any language would."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target)
        self.stub = InferenceServiceStub(self.channel)

    async def generate(self, message: pb.GenerateRequest, stream: Stream) -> list[pb.GenerateResponse]:
        """Read a stream to its end; what it brings goes into `stream`."""
        messages = []
        async for response in self.stub.Generate(message, timeout=60):
            stream.put(response)
            messages.append(response)
        return messages

    async def mend_every_break(self, message: pb.GenerateRequest) -> Stream:
        """Break the stream after each of its messages, resume it, and compare with the whole."""
        whole = Stream()
        messages = await self.generate(message, whole)
        for num_received in range(1, len(messages) + 1):
            broken = Stream()
            for response in messages[:num_received]:
                broken.put(response)
            again = pb.GenerateRequest(resume=broken.resume)
            again.MergeFrom(message)
            await self.generate(again, broken)
            broken.assert_like(whole)
        return whole


@pytest.fixture
async def caller(tiny_server: LocalServer) -> AsyncIterator[Caller]:
    caller = Caller(tiny_server.target)
    yield caller
    await caller.channel.close()


LETTERS = range(67, 71)  # so that texts repeat themselves


async def test_greedy_with_log_probabilities_of_prompt_and_output(caller: Caller) -> None:
    whole = await caller.mend_every_break(
        request("hello", max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    )
    assert len(whole.outputs[0].logprobs) == 12
    assert len(whole.prompt_logprobs) == 4


async def test_several_outputs_with_a_seed_that_the_server_drew(caller: Caller) -> None:
    """Characters of several bytes break anywhere, outputs end at different times, and penalties count earlier
    tokens."""
    whole = await caller.mend_every_break(
        request("hello", n=3, max_tokens=12, temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    )
    assert whole.seed is not None
    assert len({tuple(output.token_ids) for output in whole.outputs.values()}) == 3


async def test_a_stop_string_is_found_across_the_break(caller: Caller) -> None:
    given: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "allowed_token_ids": LETTERS}
    whole = Stream()
    await caller.generate(request("hello", **given), whole)
    stop = whole.outputs[0].text[10:15]
    stopped = await caller.mend_every_break(request("hello", stop=[stop], **given))
    assert stopped.outputs[0].last is not None
    assert stopped.outputs[0].last[1] == stop
    # Text that could be its beginning is held back until the output ends.
    held = await caller.mend_every_break(request("hello", stop=[whole.outputs[0].text[17:] + "!"], **given))
    assert held.outputs[0].text == whole.outputs[0].text


async def test_min_tokens_count_what_came_before_the_break(caller: Caller) -> None:
    given: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 3,
        "allowed_token_ids": LETTERS,
        "stop_token_ids": [LETTERS[0]],
    }
    whole = await caller.mend_every_break(request("hello", max_tokens=30, min_tokens=8, **given))
    assert whole.outputs[0].last is not None
    assert whole.outputs[0].last[1] == LETTERS[0]
    assert len(whole.outputs[0].token_ids) > 8
    del given["stop_token_ids"]
    stopped = await caller.mend_every_break(request("hello", max_tokens=30, min_tokens=8, stop=list("abcd"), **given))
    assert len(stopped.outputs[0].token_ids) == 9


@pytest.mark.parametrize("sampling", [{"best_of": 4, "temperature": 1.0, "prompt_logprobs": 0}, {"beam_width": 4}])
async def test_outputs_that_come_whole_are_searched_again_and_those_that_came_left_out(
    caller: Caller, sampling: dict[str, Any]
) -> None:
    whole = await caller.mend_every_break(request("hello", n=3, max_tokens=8, **sampling))
    assert len(whole.outputs) == 3


async def test_nothing_received_is_resumed_as_from_the_beginning(caller: Caller) -> None:
    whole, again = Stream(), Stream()
    message = request("hello", max_tokens=5, ignore_eos=True)
    await caller.generate(message, whole)
    await caller.generate(pb.GenerateRequest(text="hello", sampling=message.sampling, resume=Stream().resume), again)
    assert again.outputs == whole.outputs


async def test_a_stream_that_breaks_again_is_resumed_again(caller: Caller) -> None:
    message = request("hello", n=2, max_tokens=12, temperature=1.0, ignore_eos=True)
    whole, broken = Stream(), Stream()
    messages = await caller.generate(message, whole)
    for response in messages[:1]:
        broken.put(response)
    for _ in range(100):
        again = pb.GenerateRequest(resume=broken.resume)
        again.MergeFrom(message)
        call = caller.stub.Generate(again)
        response = await call.read()
        call.cancel()
        if response is grpc.aio.EOF:
            break
        broken.put(response)
    broken.assert_like(whole)


async def test_the_broken_stream_of_the_same_request_makes_way(tiny_server: LocalServer, caller: Caller) -> None:
    """The server may not know that a connection is gone. Here the first client still reads, and gets an error."""
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    message, broken = pb.GenerateRequest(request_id="mine", text="a", sampling=sampling), Stream()
    first = aiter(caller.stub.Generate(message))
    broken.put(await anext(first))
    again = pb.GenerateRequest(request_id="mine", text="a", sampling=sampling, resume=broken.resume)
    await caller.generate(again, broken)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in first:
            pass
    assert error.value.code() is grpc.StatusCode.ABORTED
    assert len(broken.outputs[0].token_ids) == 400
    (worker,) = (await until_idle(tiny_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


async def test_another_models_stream_is_not_continued(caller: Caller) -> None:
    message = request("a", max_tokens=2)
    message.resume.model_fingerprint = "0" * 64
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await caller.generate(message, Stream())
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "resume.model_fingerprint" in str(error.value.details())


async def test_a_broken_stream_that_closes_late_leaves_the_one_that_goes_on_alone(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        first = await submit(engine, "same", [5], max_tokens=20)
        second = await engine.submit(replace(first.request, resumes=True))
        await engine.close(first)
        assert await text_of(engine, second) == "g" * 20
        assert not engine.requests.in_flight


async def test_a_broken_stream_ends_without_what_its_client_left_unread(byte_tokenizer_directory: Path) -> None:
    """Its client is most likely gone, and the output would stay in memory for as long as one may leave it unread."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as engine:
        first = await submit(engine, "same", [5], max_tokens=400)
        await until(lambda: first.stream.num_unread)
        second = await engine.submit(replace(first.request, resumes=True))
        assert not first.stream.num_unread
        with pytest.raises(RequestError, match="another call goes on with this request") as error:
            await anext(first.stream)
        assert error.value.code is grpc.StatusCode.ABORTED
        await engine.close(first)
        assert await text_of(engine, second) == "g" * 400


async def test_prompt_log_probabilities_go_on_where_they_broke(byte_model: ServedModel) -> None:
    """They come in pieces, as the prompt is computed, whose borders need not be those of the first stream."""
    message = resuming(request("hello you", prompt_logprobs=0), num_prompt_logprobs=3)
    state = RequestState(
        await check(message, byte_model), byte_model.tokenizer, RequestCounts(), Turns(), UnreadOutput(1 << 30)
    )
    entries = [TokenLogprobs([token_id], [-1.0], 1) for token_id in range(1, 9)]
    state.gain(Gained(0, None, prompt_logprobs=entries[:2], prompt_start=1), 0.0)
    state.gain(Gained(0, None, prompt_logprobs=entries[2:5], prompt_start=3), 0.0)
    state.gain(Gained(0, 70, prompt_logprobs=entries[5:], prompt_start=6), 0.0)
    assert (await anext(state.stream)).prompt_logprobs == entries[3:]


# ---- what is refused


def resuming(message: pb.GenerateRequest, *outputs: pb.ResumedOutput, **state: Any) -> pb.GenerateRequest:
    message.resume.CopyFrom(pb.ResumeState(**({"seed": 1} | state), outputs=outputs))
    return message


def having(*token_ids: int, index: int = 0, finished: bool = False) -> pb.ResumedOutput:
    return pb.ResumedOutput(index=index, token_ids=token_ids, finished=finished)


INVALID = {
    "no seed": (resuming(request(), having(5), seed=None), "resume.seed is missing"),
    "two seeds": (resuming(request(seed=2), having(5)), "resume.seed is 1 and sampling.seed 2"),
    "more outputs than there are": (
        resuming(request(n=2), *[having(index=i) for i in range(3)]),
        r"resume.outputs has 3 entries; at most 2 \(sampling.n\)",
    ),
    "an index past n": (resuming(request(), having(5, index=1)), r"resume.outputs\[0\].index is 1; it must be below"),
    "an index of best_of past n": (
        resuming(request(n=1, best_of=4), having(index=2, finished=True)),
        r"resume.outputs\[0\].index is 2",
    ),
    "an index twice": (
        resuming(request(n=2), having(5), having(6)),
        r"resume.outputs\[1\].index is 0, as in resume.outputs\[0\]",
    ),
    "outside the vocabulary": (
        resuming(request(), having(5, 259)),
        r"resume.outputs\[0\].token_ids contains 259; the vocabulary has 259",
    ),
    "as many tokens as there can be": (
        resuming(request(max_tokens=3), having(5, 5, 5)),
        r"resume.outputs\[0\].token_ids has 3 entries; an unfinished output has fewer than 3",
    ),
    "a million tokens": (
        resuming(request(), having(*[5] * 1_000_000)),
        r"resume.outputs\[0\].token_ids has 1000000 entries",
    ),
    "tokens behind the end": (
        resuming(request(), having(5, 2, 5)),
        r"resume.outputs\[0\].token_ids\[1\] is 2, which ends an output",
    ),
    "tokens behind the request's own end": (
        resuming(request(ignore_eos=True, stop_token_ids=[7], min_tokens=1), having(7, 7)),
        r"resume.outputs\[0\].token_ids\[1\] is 7",
    ),
    "text behind the end": (
        resuming(request(stop=["gg"]), having(73, 73, 73)),
        r"resume.outputs\[0\].token_ids contain the stop string 'gg'",
    ),
    "as many tokens as a beam can have": (
        resuming(request(beam_width=2, max_tokens=1), having(5)),
        r"resume.outputs\[0\].token_ids has 1 entries; an unfinished output has fewer than 1",
    ),
    "prompt log-probabilities that were not asked for": (
        resuming(request(), num_prompt_logprobs=1),
        "resume.num_prompt_logprobs is 1; this request has 0",
    ),
    "more prompt log-probabilities than there are": (
        resuming(request("hello", prompt_logprobs=0), num_prompt_logprobs=5),
        "resume.num_prompt_logprobs is 5; this request has 4",
    ),
}


async def check(message: pb.GenerateRequest, model: ServedModel) -> GenerationRequest:
    return await check_resumption(message, await check_request(message, "id", model), model)


@pytest.mark.parametrize(("message", "reason"), INVALID.values(), ids=INVALID)
async def test_what_cannot_be_resumed_is_refused_with_the_field(
    message: pb.GenerateRequest, reason: str, byte_model: ServedModel
) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        await check(message, byte_model)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_stop_strings_and_end_tokens_before_min_tokens_ended_nothing(byte_model: ServedModel) -> None:
    message = resuming(request(stop=["gg"], min_tokens=3), having(73, 73, 2))
    (token_ids,) = (await check(message, byte_model)).resumption.token_ids
    assert list(token_ids) == [73, 73, 2]


async def test_an_output_that_ended_needs_no_tokens(byte_model: ServedModel) -> None:
    checked = await check(resuming(request(n=2), having(index=1, finished=True), seed=None), byte_model)
    assert checked.resumption.finished == {1}
    assert not checked.is_complete
    assert (await check(resuming(request(), having(10**9, finished=True)), byte_model)).is_complete
