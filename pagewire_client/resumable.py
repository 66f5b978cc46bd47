"""A Generate call that continues after its connection or its scheduler is lost.

The client stores the seed and each output's tokens, and sends both with the same request again. The server then sends
only the tokens that the client lacks.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.retry import PASSING, Backoff, passes

Metadata = tuple[tuple[str, str], ...]
Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
# Codes after which a resumed request is repeated. ALREADY_EXISTS: the server may still check the previous attempt.
# RESOURCE_EXHAUSTED: a restarted server may receive many resumed requests at once.
PASSING_AGAIN = PASSING | {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED}


class Received:
    def __init__(self, num_outputs: int) -> None:
        self._open: dict[int, list[int]] = {index: [] for index in range(num_outputs)}
        self._finished: list[int] = []
        self._num_prompt_logprobs = 0
        self._seed: int | None = None
        self._fingerprint = ""

    @property
    def open(self) -> list[int]:
        """Indices of the outputs that have not ended."""
        return list(self._open)

    def add(self, response: pb.GenerateResponse) -> None:
        if response.HasField("seed"):
            self._seed, self._fingerprint = response.seed, response.model_fingerprint
        self._num_prompt_logprobs += len(response.prompt_logprobs)
        if response.finish_reason:
            self._open.pop(response.index, None)
            self._finished.append(response.index)
        elif response.index in self._open:
            self._open[response.index] += response.token_ids

    @property
    def state(self) -> pb.ResumeState:
        return pb.ResumeState(
            seed=self._seed,
            model_fingerprint=self._fingerprint,
            num_prompt_logprobs=self._num_prompt_logprobs,
            outputs=[
                *(pb.ResumedOutput(index=index, token_ids=tokens) for index, tokens in self._open.items() if tokens),
                *(pb.ResumedOutput(index=index, finished=True) for index in self._finished),
            ],
        )


class ResumableStream:
    """The stream of one request, over as many calls as necessary.

    `start` begins a call with a request, the seconds until its deadline, and further metadata. `timeout` applies to all
    calls together. `explain` adds advice to an error.
    """

    def __init__(
        self,
        start: Callable[[pb.GenerateRequest, float | None, Metadata], Call],
        request: pb.GenerateRequest,
        *,
        timeout: float | None,
        backoff: Backoff,
        explain: Callable[[grpc.aio.AioRpcError], Awaitable[grpc.aio.AioRpcError]],
    ) -> None:
        self._start = start
        self._request = request
        self._timeout = timeout
        self._backoff = backoff
        self._explain = explain
        self._received = Received(request.sampling.n or 1)
        self._call: Call | None = None
        self._aborted = asyncio.Event()

    async def responses(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of all calls. Raises the first grpc.aio.AioRpcError that a retry cannot fix."""
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        while self._received.open and not self._aborted.is_set():
            timeout = None if deadline is None else max(0.0, deadline - loop.time())
            self._call = self._start(self._request, timeout, self._backoff.attempt())
            try:
                async for response in self._call:
                    self._backoff.succeeded()
                    self._received.add(response)
                    yield response
                return
            except grpc.aio.AioRpcError as error:
                codes = PASSING_AGAIN if self._request.HasField("resume") else PASSING
                if not self._received.open or (self._aborted.is_set() and passes(error, codes)):
                    break
                pause = self._backoff.pause(await self._explain(error), codes)
                if deadline is not None:
                    pause = min(pause, max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                if not self._call.cancelled() or not self._aborted.is_set() or _is_cancelled():
                    raise
                break
            finally:
                self._call.cancel()  # a call that is not cancelled stays open on the server
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._aborted.wait(), pause)
            self._request.resume.CopyFrom(self._received.state)
        for index in self._received.open:  # aborted while no server had the request
            yield pb.GenerateResponse(
                request_id=self._request.request_id, index=index, finish_reason=pb.FINISH_REASON_ABORT
            )

    def abort(self) -> None:
        """From now on, a broken call ends without an error and is not resumed."""
        self._aborted.set()

    def give_up(self) -> bool:
        """After `abort`, end the stream unless a server has ended it. Returns whether an output was unfinished."""
        if not self._received.open:
            return False
        if self._call is not None:
            self._call.cancel()
        return True


def _is_cancelled() -> bool:
    """Whether the task that reads the stream has been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
