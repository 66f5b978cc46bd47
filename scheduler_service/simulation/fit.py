"""Fits a cost model to measured steps, by non-negative least squares over the columns of a step's work: the best of the
plain fits to all 63 subsets of the six columns.
"""

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Any

from scheduler_service.core import SchedulerConfig
from scheduler_service.recording.replayer import Moment
from scheduler_service.recording.step_work import StepWork
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.drafts import DraftCounts

COLUMNS = ("step", *StepWork._fields)
OPTIONAL_COLUMNS = frozenset(("swapped_blocks", "encoded_tokens"))  # 0 in all steps without swaps or images
DECODING_COLUMNS = frozenset(("decode_tokens", "context_tokens"))  # 0 in all steps of an encoder
MIN_STEPS = 50  # ten for each coefficient
MANY_STEPS = 1000
MIN_R2 = 0.8
SAME = 1e-9  # independent part of a column of length 1 that counts as 0
SMALLEST_PREFILL_US = 1e-6  # a cost model divides by this time

Step = tuple[StepWork, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model's fields, and how well they explain the steps."""

    fields: dict[str, Any]
    num_steps: int
    median_relative_error: float
    r2: float

    def doubts(self) -> Iterator[str]:
        """Sentences about what the steps hardly determine."""
        for name, part in _PARTS.items():
            is_of_an_encoder = not self.fields["num_device_blocks"] and name == "decode_token_us"
            if self.fields[name] <= SMALLEST_PREFILL_US and not is_of_an_encoder:
                yield f"{part} seems to cost nothing, so its cost cannot be told from the others; record more loads"
        if self.r2 < MIN_R2:
            yield (
                f"the model explains only {max(self.r2, 0):.0%} of the differences between the steps' times; record "
                "prompts and batches of different sizes, on a machine without other load"
            )
        if self.num_steps < MANY_STEPS:
            yield f"{self.num_steps} steps are few; {MANY_STEPS} give a model that later steps agree with"


_PARTS = {"step_us": "a step", "prefill_token_us": "a prefill token", "decode_token_us": "a decode token"}


class Measurements:
    """The answered steps of a replay, and each worker's configuration."""

    def __init__(self, worker: str | None = None) -> None:
        self.steps: list[Step] = []
        self.guesses = DraftCounts()
        self._worker = worker
        self._configs: dict[str, SchedulerConfig] = {}  # of each worker's last session

    def add(self, moment: Moment) -> None:
        if moment.session is None or self._worker not in (None, moment.session.worker):
            return
        self._configs[moment.session.worker] = moment.session.scheduler.config
        if moment.kind == "answer" and moment.step is not None and moment.at > moment.step.began_at:
            self.steps.append((moment.step.work, moment.at - moment.step.began_at))
            assert moment.step.answer is not None
            answer = moment.step.answer
            self.guesses.add(moment.step.output, answer.num_draft_tokens, answer.num_tokens)

    @property
    def config(self) -> SchedulerConfig:
        """The workers' common configuration. Raises ValueError if there is none."""
        if not self._configs:
            raise ValueError("the recording has no such worker" if self._worker else "the recording has no worker")
        kinds = {(*_sizes(config), config.groups) for config in self._configs.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"the workers {', '.join(self._configs)} are of different sizes, and a cost model is of one; name one "
                "with --worker"
            )
        return next(iter(self._configs.values()))


def fit(steps: Sequence[Step], config: SchedulerConfig) -> Fit:
    """Raises ValueError if the steps do not determine the coefficients."""
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} steps are too few to tell what one costs; at least {MIN_STEPS} are needed")
    optional = OPTIONAL_COLUMNS
    if config.is_encoder:
        steps = [(StepWork(work.prefill_tokens + work.decode_tokens, 0, 0, 0), seconds) for work, seconds in steps]
        optional |= DECODING_COLUMNS
    rows = [(1.0, *map(float, work)) for work, _ in steps]
    times = [1e6 * seconds for _, seconds in steps]
    coefficients = dict.fromkeys(COLUMNS, 0.0)
    coefficients.update(_non_negative_least_squares(rows, times, optional))
    fitted = [sum(c * x for c, x in zip(coefficients.values(), row, strict=True)) for row in rows]
    mean = sum(times) / len(times)
    spread = sum((time - mean) ** 2 for time in times)
    residual = sum((time - guess) ** 2 for time, guess in zip(times, fitted, strict=True))
    return Fit(
        _fields(coefficients, config),
        len(steps),
        median(abs(guess - time) / time for time, guess in zip(times, fitted, strict=True)),
        1 - residual / spread if spread else 0.0,
    )


def _fields(coefficients: dict[str, float], config: SchedulerConfig) -> dict[str, Any]:
    """The fields of a cost model's JSON file that the recording determines."""
    fields: dict[str, Any] = {
        "step_us": coefficients["step"],
        "prefill_token_us": max(coefficients["prefill_tokens"], SMALLEST_PREFILL_US),
        "decode_token_us": coefficients["decode_tokens"],
        "context_token_us": coefficients["context_tokens"],
        **dict(zip(SIZES, _sizes(config), strict=True)),
    }
    if config.layer_groups or config.sliding_window:
        fields["layer_groups"] = [list(group if group.chunked else group[:2]) for group in config.groups]
    if not config.block_bytes:  # the worker did not report the size of a block in bytes
        fields["block_bytes"] = CostModel().block_bytes
    if image_us := coefficients["encoded_tokens"]:
        fields["image_token_us"] = image_us
    if swap_us := coefficients["swapped_blocks"]:
        fields["swap_bytes_per_second"] = 1e6 * fields["block_bytes"] / swap_us
    elif config.swap_bytes_per_second:  # the worker measured the speed of swaps
        fields["swap_bytes_per_second"] = float(config.swap_bytes_per_second)
    return fields


SIZES = ("block_bytes", "block_size", "num_device_blocks", "num_host_blocks", "max_num_seqs", "max_num_batched_tokens")


def _sizes(config: SchedulerConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in SIZES)


def _non_negative_least_squares(
    rows: Sequence[Sequence[float]], times: Sequence[float], optional: Set[str]
) -> Iterator[tuple[str, float]]:
    """The coefficients above zero, by column. `optional` columns may be zero in all rows."""
    columns = list(zip(*rows, strict=True))
    lengths = [sum(x * x for x in column) ** 0.5 for column in columns]
    present = [i for i, length in enumerate(lengths) if length]
    for i, name in enumerate(COLUMNS):
        if i not in present and name not in optional:
            raise ValueError(f"no step has any {name.replace('_', ' ')}: record some, to tell what they cost")
    # The normal equations. Columns of length 1 let one threshold for zero fit all.
    gram = {
        (i, j): sum(x * y for x, y in zip(columns[i], columns[j], strict=True)) / (lengths[i] * lengths[j])
        for i, j in itertools.product(present, present)
    }
    right = {i: sum(x * t for x, t in zip(columns[i], times, strict=True)) / lengths[i] for i in present}
    if _solve(present, gram, right) is None:
        raise ValueError(
            "the steps are too much alike to tell what a step, a prefill token, a decode token and a token of context "
            "cost each; record prompts and batches of different sizes"
        )
    best: dict[int, float] = {}
    least = 0.0  # of the best fit: sum of squared errors minus that of squared times
    for count in range(1, len(present) + 1):
        for chosen in itertools.combinations(present, count):
            solution = _solve(chosen, gram, right)
            if solution is None or min(solution.values()) < 0:
                continue
            left = -sum(solution[i] * right[i] for i in chosen)
            if left < least:
                best, least = solution, left
    return ((COLUMNS[i], value / lengths[i]) for i, value in best.items())


def _solve(
    chosen: Sequence[int], gram: dict[tuple[int, int], float], right: dict[int, float]
) -> dict[int, float] | None:
    """Gaussian elimination; None for dependent columns. No pivoting: the matrix is positive semidefinite."""
    rows = {i: {j: gram[i, j] for j in chosen} | {-1: right[i]} for i in chosen}
    for k, pivot in enumerate(chosen):
        if rows[pivot][pivot] < SAME:
            return None
        for i in chosen[k + 1 :]:
            factor = rows[i][pivot] / rows[pivot][pivot]
            for j in rows[i]:
                rows[i][j] -= factor * rows[pivot][j]
    solution: dict[int, float] = {}
    for pivot in reversed(chosen):
        known = sum(rows[pivot][j] * value for j, value in solution.items())
        solution[pivot] = (rows[pivot][-1] - known) / rows[pivot][pivot]
    return solution
