"""Runs a trace through schedulers with one queue, on a virtual clock.

Events are arrivals, ends of steps, and retries of idle workers that left a request to a better worker. Only as many
idle workers wake as the waiting requests need.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_service.core import (
    Balancer,
    ImagePart,
    ModelOutput,
    PhaseRule,
    PreemptionMode,
    PromptItem,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.core.config import LayerGroup, default_prefill_chunk, tokens_that_fit
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.drafts import Drafting
from scheduler_service.simulation.fairness import ServiceGap
from scheduler_service.simulation.trace import Arrival, longest_sequence

TOKEN = 7  # sampled by all workers
# Seconds after the time limit of a left request, until its worker plans again.
TICK = 1e-6


@dataclass(slots=True)
class RequestTimes:
    """One request; times in seconds of the virtual clock."""

    arrival: Arrival
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def arrived(self) -> float:
        return self.arrival.at

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        assert self.finished is not None
        assert self.first_token is not None
        return (self.finished - self.first_token) / max(1, self.arrival.output_tokens - 1)

    @property
    def e2e(self) -> float:
        assert self.finished is not None
        return self.finished - self.arrived

    @property
    def queued(self) -> float:
        assert self.admitted is not None
        return self.admitted - self.arrived


@dataclass(slots=True)
class Result:
    requests: list[RequestTimes]
    seconds: float = 0.0
    busy_seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    preemptions: dict[PreemptionMode, int] = field(default_factory=dict)
    cached_tokens: int = 0
    service_gap: float = 0.0
    """Tokens, as counted in `fairness`."""
    balancer: Balancer = field(default_factory=Balancer)

    @property
    def utilisation(self) -> float:
        return sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(request.arrival.output_tokens for request in self.requests) / self.seconds


class Simulator:
    """`slowness`: factors on step times, by worker. Raises ValueError if a request could never run."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        cost_model: CostModel,
        *,
        num_workers: int,
        waiting: WaitingQueue | None = None,
        preemption_mode: PreemptionMode = PreemptionMode.AUTO,
        phase_rule: PhaseRule = PhaseRule.CHUNKED,
        max_prefill_chunk: int = 0,
        slowness: Mapping[int, float] | None = None,
    ) -> None:
        num_drafts, longest = len(cost_model.acceptance), longest_sequence(arrivals)
        groups = cost_model.layer_groups or (LayerGroup(cost_model.block_size),)
        has_tables_of_own = len(groups) > 1 or groups[0].has_states or groups[0].chunked
        most = max(cost_model.num_device_blocks * cost_model.block_size, longest + num_drafts)
        chunk = cost_model.max_num_batched_tokens + num_drafts
        pool = tokens_that_fit(groups, cost_model.num_device_blocks, chunk, most)
        if num_drafts and num_drafts >= pool:
            raise ValueError(f"a worker's pool has {pool} tokens, which is not more than {num_drafts} drafts")
        pool -= num_drafts
        if not pool:  # an encoder computes a text in one step, without blocks
            pool, longest = cost_model.max_num_batched_tokens, longest - 1
            if any(arrival.output_tokens > 1 for arrival in arrivals):
                raise ValueError("the trace has requests of several output tokens, and an encoder samples none")
        if longest > pool:
            raise ValueError(f"the longest request of the trace has {longest} tokens; a worker's pool has {pool}")
        config = SchedulerConfig(
            block_size=cost_model.block_size,
            num_device_blocks=cost_model.num_device_blocks,
            num_host_blocks=cost_model.num_host_blocks,
            max_num_batched_tokens=cost_model.max_num_batched_tokens,
            max_num_seqs=cost_model.max_num_seqs,
            max_model_len=pool,
            sliding_window=0 if has_tables_of_own else groups[0].window,
            layer_groups=groups if has_tables_of_own else (),
            num_lookahead_slots=num_drafts,
            preemption_mode=preemption_mode,
            phase_rule=phase_rule,
            max_prefill_chunk=max_prefill_chunk or default_prefill_chunk(cost_model.max_num_batched_tokens),
            block_bytes=cost_model.block_bytes,
            swap_bytes_per_second=int(cost_model.swap_bytes_per_second),
            prefill_tokens_per_second=int(cost_model.prefill_tokens_per_second),
            encoder_cache_size=cost_model.encoder_cache_size if cost_model.num_device_blocks else 0,
            encoder_budget=cost_model.encoder_budget,
            images_attend_both_ways=cost_model.images_attend_both_ways,
        )
        if any(arrival.num_images for arrival in arrivals) and cost_model.image_tokens > config.max_image_tokens:
            raise ValueError(
                f"an image has {cost_model.image_tokens} tokens; a worker has room for {config.max_image_tokens}"
            )
        self._arrivals = arrivals
        self._cost_model = cost_model
        self._slowness = slowness or {}
        self._waiting = WaitingQueue() if waiting is None else waiting
        self._workers = [Scheduler(config, self._waiting) for _ in range(num_workers)]
        self._numbers: dict[object, int] = {scheduler: number for number, scheduler in enumerate(self._workers)}
        self._idle = dict.fromkeys(range(num_workers - 1, -1, -1))  # the last to become idle plans first
        self._ends: list[tuple[float, int, SchedulerOutput]] = []  # running steps
        self._verified: list[list[int]] = [[] for _ in self._workers]  # drafts of running steps
        self._retries: list[tuple[float, int]] = []  # time, worker
        self._service_gap = ServiceGap()
        self._drafting = Drafting(cost_model.guesses, cost_model.acceptance) if num_drafts else None
        self.result = Result([RequestTimes(arrival) for arrival in arrivals], busy_seconds=[0.0] * num_workers)

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Result:
        """`progress` gets the number of finished requests."""
        num_finished = 0
        for now, worker, output in self._events():
            if worker is None:
                self._wake(now)
                continue
            if output is not None:
                num_finished += self._end_step(now, worker, output)
                self._idle[worker] = None
                progress(num_finished)
            self._ask(now, worker)
        result = self.result
        for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
            result.preemptions[mode] = sum(worker.num_preemptions[mode] for worker in self._workers)
        result.service_gap = self._service_gap.tokens
        result.balancer = self._waiting.balancer
        return result

    def _events(self) -> Iterator[tuple[float, int | None, SchedulerOutput | None]]:
        """Yield each event's time, worker and step. An arrival has neither worker nor step, a retry no step."""
        arriving = 0
        while arriving < len(self._arrivals) or self._ends or self._retries:
            next_end = self._ends[0][0] if self._ends else float("inf")
            next_retry = self._retries[0][0] if self._retries else float("inf")
            if arriving < len(self._arrivals) and self._arrivals[arriving].at <= min(next_end, next_retry):
                now = self._arrivals[arriving].at
                self._waiting.append(self._group(arriving))
                self._service_gap.arrived(self._arrivals[arriving].tenant)
                arriving += 1
                yield now, None, None
            elif next_end <= next_retry:
                now, worker, output = heapq.heappop(self._ends)
                self.result.seconds = now
                yield now, worker, output
            else:
                yield *heapq.heappop(self._retries), None

    def _group(self, number: int) -> SequenceGroup:
        """Only requests of one conversation share a prefix."""
        arrival = self._arrivals[number]
        is_alone = arrival.conversation is None
        root = f"request {number}" if is_alone else f"conversation {arrival.conversation}"
        return SequenceGroup(
            str(number),
            [TOKEN] * arrival.prompt_tokens,
            SamplingParams(max_tokens=arrival.output_tokens),
            root.encode(),
            priority=arrival.priority,
            tenant=arrival.tenant,
            arrived_at=arrival.at,
            items=self._images(number),
        )

    def _images(self, number: int) -> tuple[PromptItem, ...]:
        """The images of a request, at the beginning of the prompt, as many as it has tokens for."""
        arrival, size = self._arrivals[number], self._cost_model.image_tokens
        return tuple(
            PromptItem(f"image {place} of request {number}".encode(), place * size, size, 0, image=ImagePart(1, 1))
            for place in range(min(arrival.num_images, arrival.prompt_tokens // size))
        )

    def _wake(self, now: float) -> None:
        while self._idle and self._waiting:
            if not self._ask(now, next(reversed(self._idle))):
                return

    def _ask(self, now: float, worker: int) -> bool:
        """Let an idle worker plan, then the idle workers to which it leaves requests. Returns whether `worker` began a
        step.
        """
        to_ask, asked = [worker], set[int]()
        while to_ask:
            number = to_ask.pop()
            if number in asked or number not in self._idle:
                continue
            asked.add(number)
            output = self._workers[number].schedule(now)
            if not output.is_empty:
                del self._idle[number]
                self._start_step(now, number, output)
            elif output.ask_again_at is not None:
                heapq.heappush(self._retries, (output.ask_again_at + TICK, number))
            left_to = [placement.to for placement in (*output.moved, *output.placements)]
            to_ask += [self._numbers[other] for other in left_to if other is not None]
        return worker not in self._idle

    def _start_step(self, now: float, worker: int, output: SchedulerOutput) -> None:
        for new in output.new_sequences:
            group = new.sequence.group
            request = self.result.requests[int(group.request_id)]
            if request.admitted is None:
                request.admitted = now
                self.result.cached_tokens += group.history.num_cached_tokens or 0
                self._service_gap.admitted(request.arrival.tenant, request.arrival.prompt_tokens)
        if self._drafting is not None:
            self._verified[worker] = self._drafting.make(output)
        num_drafts = sum(self._verified[worker])
        seconds = self._cost_model.step_seconds(output, num_drafts) * self._slowness.get(worker, 1.0)
        self.result.busy_seconds[worker] += seconds
        self.result.num_steps += 1
        heapq.heappush(self._ends, (now + seconds, worker, output))

    def _end_step(self, now: float, worker: int, output: SchedulerOutput) -> int:
        if self._drafting is not None:
            answer = self._drafting.answer(output, self._verified[worker], TOKEN)
        else:
            answer = ModelOutput(output.step_id, [TOKEN] * output.num_samples)
        num_finished = 0
        for gained in self._workers[worker].update_from_output(output, answer, now):
            if gained.token_id is None:
                continue
            request = self.result.requests[int(gained.sequence.group.request_id)]
            self._service_gap.generated(request.arrival.tenant)
            if request.first_token is None:
                request.first_token = now
            if gained.sequence.status.is_finished and not gained.goes_on:
                request.finished = now
                num_finished += 1
        self._service_gap.end_step()
        return num_finished
