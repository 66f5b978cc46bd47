"""The time of a worker's steps, split into ten phases and summed over all steps since the scheduler started.

schedule, encode, decode, update and publish are measured here, around the calls of these names. move, forward, sample
and guess come with each answer. wire is the rest of the round trip.

A step that was sent ahead first waits for the step before it, which is not the wire's time. So its round trip begins at
its sending, or at the previous answer's arrival if that is later. Such round trips lie end to end, and each moment
belongs to one step.

So wire is exactly the time in which steps were in flight and the worker was in none of its four phases: protobuf, gRPC
and the network both ways, the worker's own codec and bookkeeping, and delays of this event loop. Transfers while the
worker computes another step are not part of wire. The scheduler's own phases are counted in full, overlapped or not, so
the sum of all phases is at least the time that passed.

Measuring costs 1.3 µs a step on an EPYC (Zen 5), nine readings of the clock included.
"""

from collections import deque
from dataclasses import dataclass

from pagewire.v1 import scheduler_output_pb2 as pb


@dataclass(slots=True)
class StepSplit:
    """One worker's phases, in nanoseconds, in the order of a step."""

    num_steps: int = 0
    """Number of answered steps."""
    schedule: int = 0
    """Time of planning, empty plans included."""
    encode: int = 0
    wire: int = 0
    """Time of transfer. Over few steps it may be negative: the delay of a late answer is subtracted from the next
    one.
    """
    move: int = 0
    forward: int = 0
    sample: int = 0
    guess: int = 0
    decode: int = 0
    update: int = 0
    publish: int = 0


class RoundTrips:
    """The steps in flight of one session; their times are added to `split`. Times are nanoseconds of one clock."""

    def __init__(self, split: StepSplit) -> None:
        self._split = split
        self._sent_at: deque[int] = deque()
        self._answered_at = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._sent_at)

    @property
    def waiting_since(self) -> int | None:
        """The time from which the worker can compute the oldest step in flight; None without one."""
        return max(self._sent_at[0], self._answered_at) if self._sent_at else None

    def sent(self, at: int) -> None:
        """A step is sent."""
        self._sent_at.append(at)

    def answered(self, at: int, timing: pb.StepTiming) -> None:
        """The answer to the oldest step in flight has arrived."""
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
