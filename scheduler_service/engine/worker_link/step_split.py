"""The time of a worker's steps, split into ten phases. The time of each phase is summed over all steps since the
scheduler started.

The scheduler measures the phases schedule, encode, decode, update and publish, around the calls of the functions with
these names. The worker measures the phases move, forward, sample and guess, and reports them in its answers. The phase
wire is the rest of the round trip.

A step that was sent ahead first waits in the worker until the previous step ends. This wait is not part of the phase
wire. A round trip therefore begins when its step is sent or when the previous answer arrives, whichever is later. Round
trips follow each other without overlap, and each moment belongs to one step.

The phase wire is therefore the time in which steps were in flight and the worker was in none of its four phases. The
phase wire contains protobuf, gRPC and the network in both directions, the worker's codec and bookkeeping, and delays of
the scheduler's event loop. Transfers while the worker computes another step are not part of the phase wire. The
scheduler's phases are counted in full, even if they overlap the worker's phases. The sum of all phases is therefore at
least the elapsed time.

Measuring the phases of a step takes 1.3 µs on an EPYC (Zen 5). The 1.3 µs include nine readings of the clock.
"""

from collections import deque
from dataclasses import dataclass

from pagewire.v1 import scheduler_output_pb2 as pb


@dataclass(slots=True)
class StepSplit:
    """The time of each phase of one worker's steps in nanoseconds, in the order in which a step passes the phases."""

    num_steps: int = 0
    """Number of answered steps."""
    schedule: int = 0
    """Nanoseconds of planning, empty plans included."""
    encode: int = 0
    wire: int = 0
    """Nanoseconds of transfer. The sum over few steps may be negative: if an answer arrives late, its delay is
    subtracted from the transfer time of the next step.
    """
    move: int = 0
    forward: int = 0
    sample: int = 0
    guess: int = 0
    decode: int = 0
    update: int = 0
    publish: int = 0


class RoundTrips:
    """The steps in flight of one session. When a step is answered, its times are added to `split`. All times are
    nanoseconds of one clock.
    """

    def __init__(self, split: StepSplit) -> None:
        self._split = split
        self._sent_at: deque[int] = deque()
        self._answered_at = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._sent_at)

    @property
    def waiting_since(self) -> int | None:
        """The time from which the worker can compute the oldest step in flight. The value is None if no step is in
        flight.
        """
        return max(self._sent_at[0], self._answered_at) if self._sent_at else None

    def sent(self, at: int) -> None:
        """A step is sent."""
        self._sent_at.append(at)

    def answered(self, at: int, timing: pb.StepTiming) -> None:
        """Called when the answer to the oldest step in flight has arrived."""
        began = max(self._sent_at.popleft(), self._answered_at)
        self._answered_at = at
        move, forward = 1000 * timing.move_us, 1000 * timing.forward_us
        sample, guess = 1000 * timing.sample_us, 1000 * timing.guess_us
        split = self._split
        split.num_steps += 1
        split.move += move
        split.forward += forward
        split.sample += sample
        split.guess += guess
        split.wire += at - began - move - forward - sample - guess
