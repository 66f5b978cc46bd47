"""The requests in flight, from submission until their calls are closed.

When a session ends, its requests return to the head of the queue for other workers.
"""

import asyncio
import time
from collections.abc import Sequence

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import Keyring
from scheduler_service.core import SchedulerOutput, SequenceGroup, SequenceOutput, SequenceStatus, WaitingQueue
from scheduler_service.engine.calls.admission import Admission
from scheduler_service.engine.calls.calls import Call, Outbox
from scheduler_service.engine.workers import Workers
from scheduler_service.recording.recorder import Recorder
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import FinishedRequests, Statistics
from scheduler_service.wire.messages import decode_group, pack

RESTORED_SECONDS = 2.5
"""Shortest wait for a worker after an engine's loss. Attempts to connect are at most 2 s apart."""
_RESUMED = RequestError(grpc.StatusCode.ABORTED, "another call goes on with this request")


class Requests:
    """Create the object inside the event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        waiting: WaitingQueue,
        workers: Workers,
        recorder: Recorder | None,
        keyring: Keyring | None,
    ) -> None:
        self.waiting = waiting
        self.in_flight: dict[str, Call] = {}  # by request key
        self.traced: set[Call] = set()
        self.outboxes: set[Outbox] = set()  # of each front end
        self.admission = Admission(settings, self.in_flight, keyring)
        self.statistics = Statistics()
        self.finished = FinishedRequests()
        self._workers = workers
        self._recorder = recorder
        self._settings = settings

    @property
    def has_unfinished(self) -> bool:
        """Whether any request, or any call with several texts, is open."""
        return bool(self.in_flight) or any(call.has_texts for call in self.admission.being_checked.values())

    # ---- calls by front ends

    def queue(self, call: Call, submission: pb.Submit) -> None:
        """Queue an admitted request. Raises ALREADY_EXISTS to supersede one with another prompt or adapter."""
        superseded = self._supersede(call, submission) if submission.supersedes else None
        if submission.is_complete:
            return
        call.first_output = submission.first_output
        if submission.HasField("no_worker_timeout"):
            call.no_worker_timeout = submission.no_worker_timeout
        call.group = decode_group(call.key, submission, time.monotonic(), call.adapter_id)
        self.admission.submitted(call, superseded)
        if call.group.trace_parent:
            self.traced.add(call)
        self.waiting.append(call.group)
        if self._recorder is not None:
            self._recorder.arrived(call.group)
        if self._workers.outage.is_on:
            self._limit(call)
        self._workers.wake()
        if call.is_aborted:
            self.abort(call.key)

    def stop_output(self, call: Call, index: int) -> None:
        """End an unfinished output in which the front end found a stop string."""
        group = call.group
        if group is None or group.beams is not None or index >= len(group.sequences):
            return
        sequence = group.sequences[index]
        if sequence.status.is_finished:
            return
        for scheduler in self._workers.schedulers:
            if group in scheduler.running or group in scheduler.swapped or group.request_id in self.waiting:
                scheduler.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
                break
        else:  # no worker is connected
            self._withdraw(group, SequenceStatus.FINISHED_STOPPED, index)
        self._workers.wake()

    def abort(self, key: str) -> bool:
        """End a request, and send its output so far. Returns whether the request exists."""
        is_being_checked = self.admission.abort(key)
        call = self.in_flight.get(key)
        if call is None:
            return is_being_checked
        if self._finish(call):
            call.tell_standing()
            call.tell(aborted=pb.Aborted())
        return True

    def close(self, call: Call, finished: FinishedRequest | None = None) -> None:
        self.admission.release(call)
        if call.group is not None:
            self._leave(call)
            call.group.disband()
        if finished is not None:
            self.finished.add(finished)

    def _leave(self, call: Call) -> None:
        if self.in_flight.get(call.key) is call:
            del self.in_flight[call.key]
            self.traced.discard(call)
            if call.expiry is not None:
                call.expiry.cancel()
            self._finish(call)

    def _supersede(self, later: Call, submission: pb.Submit) -> Call | None:
        """End the broken stream that `later` resumes, if any. The stream's memory counts until its call is closed."""
        call = self.in_flight.get(later.key)
        if call is None:
            return None
        assert call.group is not None
        encoder_input = call.group.encoder_input
        digest = b"" if encoder_input is None else encoder_input.digest
        items = [(item.start, item.digest) for item in call.group.items]
        ours = (call.adapter_id, pack(call.group.prompt_token_ids), digest, items)
        theirs = [(item.start, item.digest) for item in submission.items]
        if ours != (later.adapter_id, submission.prompt_token_ids, submission.encoder_input.digest, theirs):
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                "request_id is in flight already, with another prompt or adapter; to resume, "
                "send the same request again",
            )
        self._leave(call)
        call.tell_error(_RESUMED, at_once=True)
        return call

    # ---- the end of requests

    def end(self, call: Call, error: RequestError) -> None:
        self._finish(call)
        call.tell_error(error)

    def end_all(self, error: RequestError, adapter: str | None = None) -> None:
        for call in [call for call in self.in_flight.values() if adapter is None or call.adapter_id == adapter]:
            self.end(call, error)

    def fail(self, group: SequenceGroup) -> None:
        if call := self.in_flight.get(group.request_id):
            is_ignored = any(sequence.status is SequenceStatus.FINISHED_IGNORED for sequence in group.sequences)
            code = grpc.StatusCode.INVALID_ARGUMENT if is_ignored else grpc.StatusCode.INTERNAL
            self.end(call, RequestError(code, group.error or "the request could not be served"))

    def uses_adapter(self, fingerprint: str) -> bool:
        calls = (*self.in_flight.values(), *self.admission.being_checked.values())
        return any(call.adapter_id == fingerprint for call in calls)

    def _finish(self, call: Call) -> bool:
        """Returns whether the call had unfinished outputs."""
        group = call.group
        assert group is not None
        if group.is_finished:
            return False  # most requests end before their call is closed
        status = SequenceStatus.FINISHED_ABORTED
        ended = self._workers.finish(group.request_id, status)
        if not ended and group.request_id in self.waiting:  # the group waits, and no worker is connected
            self._withdraw(group, status)
            ended = True
        self._workers.wake()
        return ended

    def _withdraw(self, group: SequenceGroup, status: SequenceStatus, index: int | None = None) -> None:
        self.waiting.withdraw(group, status, index)
        if self._recorder is not None:
            self._recorder.withdrawn(group, status, index)

    # ---- outages: no worker accepts requests

    def limit_waits(self) -> None:
        """Start all requests' timers if an outage began, or cancel them."""
        for call in self.in_flight.values():
            self._limit(call)

    def _limit(self, call: Call) -> None:
        if call.expiry is not None:
            call.expiry.cancel()
            call.expiry = None
        if self._workers.outage.is_on:
            call.expiry = asyncio.get_running_loop().call_later(self._patience(call), self._expire, call)

    def _patience(self, call: Call) -> float:
        limit = self._settings.no_worker_timeout
        if call.is_restored and call.queued_seconds is None:  # the engine has just started
            return max(limit, RESTORED_SECONDS)
        return limit if call.no_worker_timeout is None else min(limit, call.no_worker_timeout)

    def _expire(self, call: Call) -> None:
        if call.key in self.waiting:
            self.end(call, self._unserved(self._patience(call)))
        else:  # a draining worker computes the request, and may still return the request to the queue
            self._limit(call)

    def refuse_unserved(self, seconds: float) -> None:
        """Raise UNAVAILABLE: no worker has described the model within `seconds`."""
        raise self._unserved(seconds)

    def _unserved(self, seconds: float) -> RequestError:
        reason = self._workers.why_unserved()
        if self._settings.api_keys is not None:  # callers with API keys must not see workers' addresses
            reason = "an operator's watch says why"
        return RequestError(grpc.StatusCode.UNAVAILABLE, f"no worker took requests for {seconds:g} s: {reason}")

    # ---- events of workers

    def admitted(self, output: SchedulerOutput) -> None:
        """Record how long new sequences' requests were queued, and send their standing."""
        now = time.monotonic()
        for group in {new.sequence.group: None for new in output.new_sequences}:
            if (call := self.in_flight.get(group.request_id)) is None or call.group is not group:
                continue
            if call.queued_seconds is None:
                call.queued_seconds = now - group.arrived_at
                self.statistics.num_prompt_tokens += group.num_prompt_tokens
                self.statistics.num_cached_tokens += min(group.history.num_cached_tokens or 0, group.num_prompt_tokens)
            call.tell_standing()

    def swapped(self, groups: Sequence[SequenceGroup]) -> None:
        for group in groups:
            if (call := self.in_flight.get(group.request_id)) is not None and call.group is group:
                call.tell_standing()

    def tell_traced(self) -> None:
        for call in self.traced:
            call.tell_change()

    def publish(self, gained: Sequence[SequenceOutput]) -> None:
        in_flight, running, num_tokens = self.in_flight, SequenceStatus.RUNNING, 0
        failed: dict[SequenceGroup, None] = {}
        for item in gained:
            sequence, token_id, logprobs, prompt_logprobs, _, goes_on, _ = item
            group = sequence.group
            call = in_flight.get(group.request_id)
            if call is None or call.group is not group:
                continue
            if group.beams is not None and group.is_finished:
                num_tokens += sum(len(hypothesis.token_ids) for hypothesis in group.beams.hypotheses)
            num_tokens += token_id is not None
            if group.error is not None and group.is_finished:
                failed[group] = None
                continue
            has_more = not group.is_plain and (logprobs is not None or prompt_logprobs is not None)
            if token_id is None or has_more or (sequence.status is not running and not goes_on):
                call.tell_gained(item)
            else:
                call.outbox.outputs.append(call.first_output + sequence.index)
                call.outbox.token_ids.append(token_id)
        for group in failed:
            self.fail(group)
        self.statistics.num_output_tokens += num_tokens
        for outbox in self.outboxes:
            if outbox.outputs:
                outbox.has_some.set()

    async def room(self) -> None:
        """Wait until all outboxes have room, except those of stopped front ends."""
        for outbox in list(self.outboxes):
            if not outbox.has_room:
                await outbox.room()
