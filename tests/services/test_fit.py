"""A cost model that is fitted to what a known one took comes back."""

import json
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from recorded_workload import Connection, MemorySink, record

from pagewire.v1 import scheduler_output_pb2 as wire
from scheduler_service.core import (
    ImagePart,
    PreemptionMode,
    PromptItem,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.core.config import LayerGroup
from scheduler_service.recording.recorder import Recorder
from scheduler_service.recording.replayer import Replayer
from scheduler_service.recording.step_work import StepWork
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.drafts import Drafting
from scheduler_service.simulation.fit import MANY_STEPS, MIN_STEPS, Fit, Measurements, fit
from scheduler_service.simulation.simulator import Simulator
from scheduler_service.simulation.trace import Arrival
from scheduler_service.wire.codec import decode_model_output

COSTS = CostModel(
    step_us=1_500.0,
    prefill_token_us=90.0,
    decode_token_us=700.0,
    context_token_us=2.5,
    swap_bytes_per_second=2e8,
    block_bytes=200_000,
    block_size=4,
    num_device_blocks=40,
    num_host_blocks=30,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
CONFIG = SchedulerConfig(
    block_size=COSTS.block_size,
    num_device_blocks=COSTS.num_device_blocks,
    num_host_blocks=COSTS.num_host_blocks,
    max_num_seqs=COSTS.max_num_seqs,
    max_num_batched_tokens=COSTS.max_num_batched_tokens,
    max_model_len=160,
    preemption_mode=PreemptionMode.SWAP,
    block_bytes=COSTS.block_bytes,
)


def record_worker(
    path: Path, costs: CostModel, config: SchedulerConfig = CONFIG, *, noise: float = 0.0, most_tokens: int = 60
) -> None:
    """One worker that takes as long as the cost model says, with two steps in flight."""
    random, sink, connection = Random(1), MemorySink(), Connection(1)
    now = 50.0
    recorder = Recorder(sink, policy="fcfs", overtakes=1, tenant_weights={}, clock=lambda: now)
    waiting = WaitingQueue()
    scheduler = recorder.scheduler(config, waiting, "here:1", connection)
    for number in range(40):
        prompt = [random.randrange(100) for _ in range(random.randint(2, 60))]
        sampling = SamplingParams(max_tokens=random.randint(1, most_tokens))
        image = PromptItem(b"%d" % number, 0, 4, 9, image=ImagePart(1, 1))
        has_image = config.encoder_cache_size > 0 and number % 2 and len(prompt) > 4
        group = SequenceGroup(str(number), prompt, sampling, arrived_at=now, items=(image,) if has_image else ())
        waiting.append(group)
        recorder.arrived(group)
    guessing = Drafting(costs.guesses, costs.acceptance)
    in_flight: deque[tuple[SchedulerOutput, list[int], float, float]] = deque()
    answered_at = now
    while scheduler.has_work or in_flight:
        output = scheduler.schedule(now)
        if not output.is_empty:
            verified = guessing.make(output)
            in_flight.append((output, verified, now, costs.step_seconds(output, sum(verified))))
            if len(in_flight) < 2:
                now += 1e-5
                continue
        output, verified, sent_at, seconds = in_flight.popleft()
        seconds *= 1 + random.uniform(-noise, noise)
        now = answered_at = max(sent_at, answered_at) + seconds
        answer = guessing.answer(output, verified, 1)
        connection.last_answer = wire.ModelOutput(
            step_id=output.step_id,
            token_ids=answer.token_ids,
            num_tokens=answer.num_tokens,
            num_draft_tokens=answer.num_draft_tokens,
            num_draft_tokens_wanted=answer.num_draft_tokens_wanted,
        )
        scheduler.update_from_output(output, decode_model_output(connection.last_answer), now)
    path.write_bytes(sink.data)


def measure(path: Path, worker: str | None = None) -> Measurements:
    measurements = Measurements(worker)
    for moment in Replayer().run(path):
        measurements.add(moment)
    return measurements


def fit_to(path: Path) -> Fit:
    measurements = measure(path)
    return fit(measurements.steps, measurements.config)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_coefficients_of_a_known_cost_model_come_back(tmp_path: Path) -> None:
    costs = replace(COSTS, image_token_us=300.0)
    record_worker(tmp_path / "recording", costs, replace(CONFIG, encoder_cache_size=16))
    result = fit_to(tmp_path / "recording")
    assert "image_token_us" in result.fields
    for name, value in result.fields.items():
        assert value == pytest.approx(getattr(costs, name), rel=1e-3), name
    assert result.r2 > 0.999999
    assert result.median_relative_error < 1e-6


def test_how_often_guesses_come_and_are_right_comes_back(tmp_path: Path) -> None:
    """And a guess costs what a token of a prompt does. A sequence's first steps and those after a swap have no room for
    guesses, and the last ones little, so fewer are made than would be."""
    costs = replace(COSTS, guesses=(0.9, 0.5), acceptance=(0.8, 0.4), num_device_blocks=400)
    config = replace(CONFIG, num_lookahead_slots=2, num_device_blocks=400, max_model_len=700)
    record_worker(tmp_path / "recording", costs, config, most_tokens=600)
    found = measure(tmp_path / "recording").guesses.fields
    assert found["guesses"] == pytest.approx(costs.guesses, abs=0.15)
    assert all(share < most for share, most in zip(found["guesses"], costs.guesses, strict=True))
    assert found["acceptance"] == pytest.approx(costs.acceptance, abs=0.06)
    assert fit_to(tmp_path / "recording").fields["prefill_token_us"] == pytest.approx(COSTS.prefill_token_us, rel=1e-3)
    result = command("scheduler_service.fit", tmp_path / "recording", tmp_path / "costs.json")
    assert result.returncode == 0, result.stderr
    assert CostModel.read(tmp_path / "costs.json").acceptance == tuple(found["acceptance"])


def test_noise_moves_them_a_little_and_the_quality_says_so(tmp_path: Path) -> None:
    record_worker(tmp_path / "recording", COSTS, noise=0.1)
    result = fit_to(tmp_path / "recording")
    assert 0.02 < result.median_relative_error < 0.08
    assert 0.9 < result.r2 < 1
    assert result.fields["prefill_token_us"] == pytest.approx(COSTS.prefill_token_us, rel=0.2)
    assert result.fields["decode_token_us"] == pytest.approx(COSTS.decode_token_us, rel=0.2)


def test_what_costs_nothing_is_fitted_as_nothing_and_never_as_less(tmp_path: Path) -> None:
    record_worker(
        tmp_path / "recording",
        CostModel(step_us=0.0, prefill_token_us=50.0, decode_token_us=300.0, context_token_us=0.0),
        noise=0.3,
    )
    result = fit_to(tmp_path / "recording")
    assert all(value >= 0 for value in result.fields.values())
    assert result.fields["context_token_us"] < 1
    assert any("a step seems to cost nothing" in doubt for doubt in result.doubts())


def test_a_fit_doubts_what_few_or_noisy_steps_say() -> None:
    random = Random(3)
    work = [StepWork(random.randrange(40), random.randrange(1, 9), random.randrange(400), 0) for _ in range(60)]
    found = fit([(item, random.random()) for item in work], CONFIG)
    *_, explains, few = found.doubts()
    assert explains.startswith("the model explains only 2% of the differences")
    assert few.startswith("60 steps are few")


def test_a_worker_that_never_swapped_keeps_its_own_measurement_of_that(tmp_path: Path) -> None:
    config = SchedulerConfig(
        block_size=4,
        num_device_blocks=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=160,
        swap_bytes_per_second=123_456,
        block_bytes=10,
    )
    record_worker(tmp_path / "recording", COSTS, config)
    result = fit_to(tmp_path / "recording")
    assert result.fields["swap_bytes_per_second"] == 123_456
    assert result.fields["num_host_blocks"] == 0
    assert result.fields["step_us"] == pytest.approx(COSTS.step_us, rel=1e-3)


@pytest.mark.parametrize("groups", [(LayerGroup(4), LayerGroup(2)), (LayerGroup(4, 8, chunked=True),)], ids=str)
def test_groups_of_layers_are_among_the_fields(groups: tuple[LayerGroup, ...], tmp_path: Path) -> None:
    record_worker(tmp_path / "recording", COSTS, replace(CONFIG, layer_groups=groups, num_device_blocks=120))
    (tmp_path / "costs.json").write_text(json.dumps(fit_to(tmp_path / "recording").fields))
    costs = CostModel.read(tmp_path / "costs.json")
    assert costs.layer_groups == groups
    simulator = Simulator([Arrival(0.0, 20, 5)], costs, num_workers=1)
    assert simulator.run().requests[0].e2e > 0
    assert simulator._workers[0].config.groups == groups


def test_too_few_steps_are_refused() -> None:
    steps = [(StepWork(0, 1, 10, 0), 0.01)] * (MIN_STEPS - 1)
    with pytest.raises(ValueError, match="49 steps are too few to tell what one costs; at least 50 are needed"):
        fit(steps, CONFIG)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ([StepWork(0, 1 + i % 3, 10 + i, 0) for i in range(60)], "no step has any prefill tokens"),
        ([StepWork(8, 2, 10 + i, 0) for i in range(60)], "the steps are too much alike"),
    ],
)
def test_steps_that_cannot_tell_costs_apart_are_refused(work: list[StepWork], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fit([(item, 0.01) for item in work], CONFIG)


def test_an_encoder_has_no_decodes_to_tell_the_cost_of() -> None:
    config = SchedulerConfig(
        block_size=16, num_device_blocks=0, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=512
    )
    work = [StepWork(tokens, number % 2, tokens + number % 2, 0) for number, tokens in enumerate(range(10, 500, 7))]
    steps = [(item, (2000 + 50 * (item.prefill_tokens + item.decode_tokens)) / 1e6) for item in work]
    found = fit(steps, config)
    assert found.fields["prefill_token_us"] == pytest.approx(50)
    assert found.fields["step_us"] == pytest.approx(2000)
    assert (found.fields["num_device_blocks"], found.fields["decode_token_us"]) == (0, 0)


def test_a_plan_is_made_of_a_recording_by_two_commands(tmp_path: Path) -> None:
    recording, model, trace = tmp_path / "recording", tmp_path / "costs.json", tmp_path / "trace.csv"
    groups = LayerGroup(CONFIG.block_size), LayerGroup(CONFIG.block_size, window=9), LayerGroup(0)
    record_worker(recording, COSTS, replace(CONFIG, layer_groups=groups), noise=0.05)
    result = command("scheduler_service.fit", recording, model)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert 100 < report["steps"] < MANY_STEPS
    assert f"warning: {report['steps']} steps are few" in result.stderr
    assert 0 < report["median_relative_error"] < 0.05
    assert 0.9 < report["r2"] < 1
    assert report["cost_model"] == json.loads(model.read_text())
    assert CostModel.read(model).layer_groups == groups
    assert CostModel.read(model).decode_token_us == pytest.approx(COSTS.decode_token_us, rel=0.1)
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:{s:02},20,5\n" for s in range(30))
    )
    simulated = command(
        "scheduler_service.simulate", "--trace", trace, "--cost-model", model, "--scheduling-policy", "fcfs"
    )
    assert simulated.returncode == 0, simulated.stderr


def test_the_steps_before_a_cut_are_enough(tmp_path: Path) -> None:
    record_worker(tmp_path / "recording", COSTS)
    data = (tmp_path / "recording").read_bytes()
    (tmp_path / "recording").write_bytes(data[:-1])
    result = command("scheduler_service.fit", tmp_path / "recording", tmp_path / "costs.json")
    assert result.returncode == 0
    assert "is cut off" in result.stderr
    assert "fitted to the steps before" in result.stderr


def test_workers_of_different_sizes_have_to_be_named(tmp_path: Path) -> None:
    sink = MemorySink()
    recorder = Recorder(sink, policy="fcfs", overtakes=1, tenant_weights={})
    for number, size in enumerate((4, 8)):
        config = SchedulerConfig(
            block_size=size, num_device_blocks=9, max_num_seqs=1, max_num_batched_tokens=9, max_model_len=9
        )
        recorder.scheduler(config, WaitingQueue(), f"worker:{number}", Connection(1))
    (tmp_path / "recording").write_bytes(sink.data)
    with pytest.raises(ValueError, match=r"worker:0, worker:1 are of different sizes, .* name one with --worker"):
        measure(tmp_path / "recording").config  # noqa: B018
    assert measure(tmp_path / "recording", "worker:1").config.block_size == 8


def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    record(tmp_path / "short", Random(1), num_actions=5)
    (tmp_path / "text").write_text("hello")
    for name, reason in (("short", "are too few to tell"), ("text", "is not a recording"), ("none", "No such file")):
        result = command("scheduler_service.fit", tmp_path / name, tmp_path / "costs.json")
        assert result.returncode == 1
        assert reason in result.stderr.strip().splitlines()[-1]
        assert "Traceback" not in result.stderr
