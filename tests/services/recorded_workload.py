"""Drives and records the real core through everything that can happen: workers that come and go, steps planned ahead,
aborts, stop strings, failures, wrong answers. Tokens are random.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from pagewire.v1 import scheduler_output_pb2 as wire
from scheduler_service.core import (
    ImagePart,
    PhaseRule,
    PreemptionMode,
    PromptItem,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from scheduler_service.core.config import LayerGroup
from scheduler_service.policies import waiting_queue
from scheduler_service.recording.recorder import Recorder
from scheduler_service.wire.codec import decode_model_output

OVERTAKES = 3
WEIGHTS = {"0": 2.0, "1": 0.5}


class MemorySink:
    """A recording in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.failure = ""
        self.is_open = True

    def add(self, data: bytes) -> None:
        self.data += data

    def stop(self, reason: str) -> None:
        self.failure = reason
        self.is_open = False

    def close(self) -> None:
        self.is_open = False


class Clock:
    """A clock that advances with every reading."""

    def __init__(self, first: float = 1000.0) -> None:
        self._ticks = itertools.count()
        self._first = first

    def __call__(self) -> float:
        return self._first + next(self._ticks) / 128


@dataclass
class Connection:
    epoch: int
    last_answer: wire.ModelOutput = field(default_factory=wire.ModelOutput)


@dataclass
class Worker:
    scheduler: Scheduler
    connection: Connection
    in_flight: deque[SchedulerOutput] = field(default_factory=deque)

    def plan(self, now: float) -> SchedulerOutput:
        output = self.scheduler.schedule(now)
        if not output.is_empty:
            self.in_flight.append(output)
        return output

    def answer(self, random: Random, now: float, *, failures: float = 0.0) -> bool:
        """Apply the oldest answer; returns whether it was valid."""
        output = self.in_flight.popleft()
        token_ids = [random.randrange(10) for _ in range(output.num_samples)]
        if random.random() < failures:
            token_ids.append(0)
        answer = wire.ModelOutput(epoch=self.connection.epoch, step_id=output.step_id, token_ids=token_ids)
        for sequence, _, samples in output.scheduled:
            if samples and (width := sequence.sampling.num_logprobs) is not None:
                answer.logprobs.add(
                    sequence_id=sequence.id,
                    width=1 + width,
                    token_ids=[0, *random.sample(range(40), width)],
                    logprobs=[0.0, *sorted((-random.random() for _ in range(width)), reverse=True)],
                    ranks=[1],
                )
        if output.scheduled and output.scheduled[0].samples and random.random() < 2 * failures:
            answer.failed_sequence_ids.append(output.scheduled[0].sequence.id)
        if output.items_to_encode and random.random() < 4 * failures:
            name = output.items_to_encode[0]
            answer.failed_items.add(digest=name.digest, part=name.part)
        self.connection.last_answer = answer
        try:
            gained = self.scheduler.update_from_output(output, decode_model_output(answer), now)
        except ValueError:
            return False
        for sequence, *_ in gained:
            if sequence.group.error is not None:  # as the engine does it
                self.scheduler.finish_requests([sequence.group.request_id], SequenceStatus.FINISHED_ABORTED)
        return True


def _images(random: Random, num_tokens: int) -> tuple[PromptItem, ...]:
    """Two parts of an image, or none."""
    size = random.randint(1, 4)
    start = random.randrange(num_tokens)
    if start + 2 * size > num_tokens:
        return ()
    digest = b"%d" % size
    return tuple(PromptItem(digest, start + n * size, size, 9, b"png", ImagePart(1, 1, n)) for n in range(2))


def with_layer_groups(config: SchedulerConfig, random: Random) -> SchedulerConfig:
    """A worker of a hybrid model: its layers keep all tokens, those of windows or chunks, or states."""
    size, states = config.block_size, LayerGroup(0)
    window = LayerGroup(size, random.choice([1, 4, 9]), chunked=random.random() < 0.5)
    groups = random.choice(
        [
            (LayerGroup(2 * size), window),
            (LayerGroup(size), states),
            (LayerGroup(2 * size), window, states, states),
            (window, states),
            (states,),
        ]
    )
    has_states, block_size = groups[-1].has_states, groups[0].block_size or size
    return replace(
        config,
        block_size=block_size,
        layer_groups=groups,
        num_device_blocks=config.num_device_blocks * len(groups),
        num_host_blocks=config.num_host_blocks * len(groups),
        max_num_batched_tokens=max(config.max_num_batched_tokens, block_size),
        sliding_window=0,
        num_lookahead_slots=0 if has_states else config.num_lookahead_slots,
        images_attend_both_ways=config.images_attend_both_ways and not has_states,
    )


class Workload:
    """Up to `num_workers` workers of one size, and requests that share a few beginnings."""

    def __init__(
        self,
        random: Random,
        recorder: Recorder,
        *,
        policy: str = "fcfs",
        phase_rule: PhaseRule = PhaseRule.CHUNKED,
        mode: PreemptionMode = PreemptionMode.RECOMPUTE,
        num_workers: int = 2,
        most_in_flight: int = 2,
        is_hybrid: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.random = random
        self.recorder = recorder
        self.clock = clock or Clock()
        self.waiting = waiting_queue(policy, OVERTAKES, WEIGHTS)
        block_size = random.randint(1, 5)
        self.config = SchedulerConfig(
            block_size=block_size,
            num_device_blocks=random.randint(2, 24),
            max_num_batched_tokens=random.randint(6, 40),
            max_num_seqs=random.randint(1, 6),
            max_prefill_chunk=random.choice([0, 1, 4]),
            max_model_len=64,
            num_host_blocks=random.randint(0, 16),
            watermark=random.choice([0.0, 0.2]),
            prefix_caching=random.random() < 0.7,
            phase_rule=phase_rule,
            delay_factor=random.choice([0.0, 2.0]) if phase_rule is PhaseRule.SEPARATE else 0.0,
            preemption_mode=mode,
            block_bytes=1000,
            swap_bytes_per_second=100_000,
            prefill_tokens_per_second=50 * block_size,
            max_loras=random.randint(1, 2),
            num_lookahead_slots=random.randint(0, 1),
            sliding_window=random.choice([0, 0, 4]),
            max_held_loras=random.choice([0, 1, 2]),
            lora_copy_seconds=random.choice([0.0, 0.3]),
            encoder_cache_size=random.choice([3, 9]),
            encoder_budget=random.choice([0, 6]),
            images_attend_both_ways=random.random() < 0.5,
        )
        if is_hybrid:
            self.config = with_layer_groups(self.config, random)
        self.workers: list[Worker | None] = [None] * num_workers
        self.most_in_flight = most_in_flight
        self.groups: list[SequenceGroup] = []
        self.failures = 0.01  # of answers
        self._epochs = itertools.count(1)

    def run(self, num_actions: int = 150) -> None:
        for _ in range(num_actions):
            self._act()
        self.failures = 0.0
        for _ in range(5_000):
            for number in range(len(self.workers)):
                self._connect(number)
                if (worker := self.workers[number]) and not worker.scheduler.admits:
                    self._drain(number)
            workers = [worker for worker in self.workers if worker is not None]
            if not any(worker.scheduler.has_work or worker.in_flight for worker in workers):
                break
            for number in range(len(self.workers)):
                self._step(number)
        assert all(group.is_finished for group in self.groups)
        for number in range(len(self.workers)):
            self._lose(number)
        self.recorder.close()

    def _act(self) -> None:
        number = self.random.randrange(len(self.workers))
        match self.random.choices(
            ["step", "arrive", "abort", "stop", "lose", "connect", "drain", "reset"],
            weights=[60, 15, 3, 3, 2, 10, 1, 1],
        )[0]:
            case "step":
                self._step(number)
            case "arrive":
                self._arrive()
            case "abort":
                self._abort()
            case "stop":
                self._stop()
            case "lose":
                self._lose(number)
            case "connect":
                self._connect(number)
            case "drain":
                self._drain(number)
            case "reset":
                if worker := self.workers[number]:
                    worker.scheduler.reset_prefix_cache()

    def _connect(self, number: int) -> None:
        if self.workers[number] is None:
            connection = Connection(next(self._epochs))
            scheduler = self.recorder.scheduler(self.config, self.waiting, f"worker:{number}", connection)
            if self.random.random() < 0.5:
                scheduler.hold_adapter("a")
            self.workers[number] = Worker(scheduler, connection)

    def _step(self, number: int) -> None:
        if (worker := self.workers[number]) is None:
            return
        is_full = len(worker.in_flight) == self.most_in_flight
        if not is_full:
            output = worker.plan(self.clock())
            self._bring_adapter(worker.scheduler, output.lacking_adapters)
            if not output.is_empty and self.random.random() < 0.7:
                return
        if worker.in_flight and not worker.answer(self.random, self.clock(), failures=self.failures):
            self._lose(number)

    def _bring_adapter(self, scheduler: Scheduler, lacking: list[str]) -> None:
        """As the engine does: the adapter in transfer arrives or fails, then the next begins."""
        if scheduler.adapters.is_fetching and self.random.random() < 0.5:
            scheduler.end_fetch(self.random.choice([None, 0.1, 0.1, 2.0]))
        scheduler.begin_fetch(lacking, self.random.choice([[], ["b", "c"]]))
        unused = scheduler.adapters.held - {group.adapter_id for group in (*scheduler.running, *scheduler.swapped)}
        if unused and self.random.random() < 0.05:
            scheduler.drop_adapter(min(unused))

    def _arrive(self) -> None:
        random = self.random
        prompt = [7] * random.randint(1, 12) + [random.randrange(10) for _ in range(random.randint(0, 12))]
        max_tokens = random.randint(1, 12)
        n, beam_width = random.choice([1, 1, 1, 2, 3]), random.choice([0, 0, 0, 2, 3])
        resumed = not beam_width and random.random() < 0.2
        group = SequenceGroup(
            str(len(self.groups)),
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                n=n,
                min_tokens=random.randint(0, max_tokens),
                eos_token_ids=frozenset({random.randrange(40)}),
                stop_token_ids=frozenset({random.randrange(40)}),
                seed=random.getrandbits(63),
                logit_bias={3: 0.5},
                bad_words=((1, 2), (3,)),
                beam_width=beam_width,
                early_stopping=random.random() < 0.5,
            ),
            bytes([random.randrange(2)]),
            priority=random.randint(-2, 2),
            tenant=str(random.randrange(3)),
            adapter_id=random.choice(["", "", "a", "b"]),
            arrived_at=self.clock(),
            output_token_ids=tuple((5,) * random.randrange(max_tokens) for _ in range(n)) if resumed else (),
            ended=frozenset(random.sample(range(n), random.randrange(n))) if resumed else frozenset(),
            items=_images(random, len(prompt)),
        )
        self.groups.append(group)
        self.waiting.append(group)
        self.recorder.arrived(group)

    def _abort(self) -> None:
        """As the engine does: by the scheduler that knows the request, or out of the queue."""
        if not self.groups:
            return
        group = self.random.choice(self.groups)
        status = SequenceStatus.FINISHED_ABORTED
        workers = [worker for worker in self.workers if worker is not None]
        if any(worker.scheduler.finish_requests([group.request_id], status) for worker in workers):
            return
        if group.request_id in self.waiting:
            self.waiting.withdraw(group, status)
            self.recorder.withdrawn(group, status)

    def _stop(self) -> None:
        """As the engine does: for an output with text, which may be waiting or computed again."""
        groups = [group for group in self.groups if group.beams is None and any(self._with_text(group))]
        if not groups:
            return
        group, status = self.random.choice(groups), SequenceStatus.FINISHED_STOPPED
        sequence = self.random.choice(self._with_text(group))
        waits = group.request_id in self.waiting
        for worker in filter(None, self.workers):
            scheduler = worker.scheduler
            if waits or group in scheduler.running or group in scheduler.swapped:
                scheduler.finish_sequence(sequence, status)
                return
        self.waiting.withdraw(group, status, sequence.index)
        self.recorder.withdrawn(group, status, sequence.index)

    @staticmethod
    def _with_text(group: SequenceGroup) -> list[Sequence]:
        return [sequence for sequence in group.live if sequence.output_token_ids]

    def _lose(self, number: int) -> None:
        if worker := self.workers[number]:
            self.workers[number] = None
            worker.scheduler.release_all(self.clock(), blames=self.random.random() < 0.7)

    def _drain(self, number: int) -> None:
        if worker := self.workers[number]:
            worker.scheduler.set_admission(not worker.scheduler.admits)


def record(path: Path, random: Random, *, policy: str = "fcfs", num_actions: int = 150, **options: object) -> Workload:
    """Run a workload and write its recording to a file."""
    sink, clock = MemorySink(), Clock()
    recorder = Recorder(sink, policy=policy, overtakes=OVERTAKES, tenant_weights=WEIGHTS, clock=clock)
    workload = Workload(random, recorder, policy=policy, clock=clock, **options)  # type: ignore[arg-type]
    workload.run(num_actions)
    assert not sink.failure
    path.write_bytes(sink.data)
    return workload
