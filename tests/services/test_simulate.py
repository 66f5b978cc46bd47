"""The simulator: real scheduling decisions, made-up steps, a virtual clock."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_service.core import FairQueue, PreemptionMode, PriorityQueue, WaitingQueue
from scheduler_service.core.config import LayerGroup
from scheduler_service.simulate import parse_arguments
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.senders import converse, deal
from scheduler_service.simulation.simulator import Simulator
from scheduler_service.simulation.trace import Arrival, TraceError, read_trace

COSTS = CostModel(
    step_us=1000,
    prefill_token_us=100,
    decode_token_us=500,
    context_token_us=1,
    block_size=4,
    num_device_blocks=32,
    num_host_blocks=32,
    max_num_batched_tokens=64,
    max_num_seqs=8,
)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def burst(count: int) -> list[Arrival]:
    return [Arrival(number * 0.001, 10 + number % 30, 1 + number * 7 % 40) for number in range(count)]


def test_one_request_takes_what_arithmetic_says() -> None:
    """A prompt of 10 and three tokens: one step of prefill, then two of decode with a context that grows."""
    result = Simulator([Arrival(0.0, 10, 3)], COSTS, num_workers=1).run()
    (request,) = result.requests
    prefill = (1000 + 10 * 100 + 10) / 1e6
    decodes = [(1000 + 500 + context) / 1e6 for context in (11, 12)]
    assert request.queued == 0
    assert request.ttft == pytest.approx(prefill)
    assert request.e2e == pytest.approx(prefill + sum(decodes))
    assert request.tpot == pytest.approx(sum(decodes) / 2)
    assert result.utilisation == pytest.approx(1)


def test_a_request_with_images_encodes_one_a_step(tmp_path: Path) -> None:
    """The first chunk ends before the second of two images; there is no room for a third in the prompt."""
    costs = replace(COSTS, image_tokens=4, image_token_us=700, encoder_cache_size=8)
    (trace := tmp_path / "trace.csv").write_text(f"{HEADER.strip()},NumImages\n2023-11-16 18:15:46,10,1,9\n")
    (arrival,) = read_trace(trace)
    assert arrival.num_images == 9
    (request,) = Simulator([arrival], costs, num_workers=1).run().requests
    assert request.ttft == pytest.approx((2 * (1000 + 4 * 700) + 10 * 100 + 4 + 10) / 1e6)
    few = replace(costs, images_attend_both_ways=True, max_num_batched_tokens=16, max_num_seqs=14)
    for small in (replace(costs, encoder_cache_size=3), few):
        with pytest.raises(ValueError, match=r"an image has 4 tokens; a worker has room for 3"):
            Simulator([arrival], small, num_workers=1)


def test_requests_whose_layers_have_windows_need_fewer_blocks(tmp_path: Path) -> None:
    """A sequence of 120 tokens needs 15 blocks of 8 tokens, and of each window's 4 only those with the last tokens."""
    file, long = tmp_path / "costs.json", [Arrival(0.0, 100, 20), Arrival(0.0, 100, 20)]
    file.write_text('{"block_size": 8, "layer_groups": [[8, 0], [4, 6, true]], "num_device_blocks": 50}')
    windows = replace(CostModel.read(file), max_num_batched_tokens=16, max_num_seqs=8, num_host_blocks=0)
    assert windows.layer_groups == (LayerGroup(8), LayerGroup(4, 6, chunked=True))
    wide = replace(windows, layer_groups=((LayerGroup(8), LayerGroup(4))))
    few, many = (Simulator(long, costs, num_workers=1).run().requests for costs in (windows, wide))
    assert max(request.queued for request in few) < min(request.e2e for request in few)
    assert max(request.queued for request in many) >= min(request.e2e for request in many)


def test_requests_whose_layers_have_states_need_a_block_in_each_group_for_any_length(tmp_path: Path) -> None:
    """Three of four requests fit into six blocks."""
    file = tmp_path / "costs.json"
    file.write_text('{"block_size": 8, "layer_groups": [[0, 0], [0, 0]], "num_device_blocks": 6}')
    costs = replace(CostModel.read(file), max_num_batched_tokens=64, max_num_seqs=8, num_host_blocks=0)
    requests = Simulator([Arrival(0.0, 300, 20)] * 4, costs, num_workers=1).run().requests
    first_end = min(request.e2e for request in requests)
    assert sum(request.queued < first_end for request in requests) == 3
    with_keys = replace(costs, layer_groups=(LayerGroup(8), LayerGroup(0)), num_device_blocks=2 * 41)
    requests = Simulator([Arrival(0.0, 300, 20)] * 3, with_keys, num_workers=1).run().requests
    assert sum(request.queued < min(request.e2e for request in requests) for request in requests) == 2


def test_guesses_save_steps_and_cost_what_tokens_of_a_prompt_cost() -> None:
    """After the first token, a step of four, the last known token and three guesses, which are all right; then there is
    room for half of what is left."""
    costs = replace(COSTS, guesses=(1.0, 1.0, 1.0), acceptance=(1.0, 1.0, 1.0))
    result = Simulator([Arrival(0.0, 10, 9)], costs, num_workers=1).run()
    (request,) = result.requests
    prefill = (1000 + 10 * 100 + 10) / 1e6
    steps = [(3, 11), (1, 15), (0, 17), (0, 18)]  # guesses, and what is attended to
    decodes = [(1000 + 500 + num_drafts * 100 + context) / 1e6 for num_drafts, context in steps]
    assert result.num_steps == 6  # the last one tells the worker that the request has ended
    assert request.e2e == pytest.approx(prefill + sum(decodes))
    assert request.tpot == pytest.approx(sum(decodes) / 8)


@pytest.mark.parametrize(("acceptance", "num_steps"), [((0.0, 0.0), 1002), ((0.5, 0.5), 573), ((1.0, 0.0), 503)])
def test_as_many_tokens_are_gained_as_guesses_are_right(acceptance: tuple[float, ...], num_steps: int) -> None:
    """A prompt, 1,000 more tokens in steps of 1, of 1.75 in the mean, or of 2 but for the last two, and a step that
    tells the end."""
    costs = replace(COSTS, guesses=(1.0, 1.0), acceptance=acceptance, num_device_blocks=2000)
    result = Simulator([Arrival(0.0, 10, 1001)], costs, num_workers=1).run()
    assert result.num_steps == pytest.approx(num_steps, rel=0.06 if acceptance == (0.5, 0.5) else 0)


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_request_finishes_under_every_policy_and_the_outcome_is_the_same_every_time(
    policy: type[WaitingQueue], mode: PreemptionMode, num_workers: int
) -> None:
    def run() -> tuple[object, ...]:
        simulator = Simulator(
            deal(burst(60), {"a": 1, "b": 1, "c": 1}, {0: 1, -1: 1}),
            COSTS,
            num_workers=num_workers,
            waiting=policy(),
            preemption_mode=mode,
        )
        result = simulator.run()
        assert all(request.finished is not None for request in result.requests)
        return result.seconds, result.preemptions, [request.e2e for request in result.requests]

    assert run() == run()


def test_a_small_pool_preempts_by_the_chosen_mode() -> None:
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        preemptions = Simulator(burst(60), COSTS, num_workers=1, preemption_mode=mode).run().preemptions
        assert preemptions[mode] > 0


def test_more_workers_shorten_the_queue() -> None:
    waits = [
        sum(request.queued for request in Simulator(burst(100), COSTS, num_workers=count).run().requests)
        for count in (1, 2, 4, 8)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < waits[0] / 4


def test_a_request_larger_than_a_workers_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="129 tokens; a worker's pool has 128"):
        Simulator([Arrival(0.0, 100, 29)], COSTS, num_workers=1)


@pytest.mark.parametrize("num_device_blocks", [0, 1])
def test_guesses_without_room_for_a_token_are_refused(num_device_blocks: int) -> None:
    costs = replace(COSTS, guesses=(1.0,) * 4, acceptance=(1.0,) * 4, num_device_blocks=num_device_blocks)
    with pytest.raises(ValueError, match="not more than 4 drafts"):
        Simulator([Arrival(0.0, 1, 1)], costs, num_workers=1)


def test_an_encoder_computes_texts_whole_and_samples_nothing() -> None:
    costs = replace(COSTS, num_device_blocks=0, num_host_blocks=0)
    texts = [Arrival(0.0, 40, 1), Arrival(0.0, 30, 1), Arrival(0.0, 20, 1)]
    result = Simulator(texts, costs, num_workers=1).run()
    first, second = ((1000 + tokens * (100 + 1)) / 1e6 for tokens in (40, 50))  # 64 tokens a step, context included
    assert [request.ttft for request in result.requests] == pytest.approx([first, first + second, first + second])
    with pytest.raises(ValueError, match="65 tokens; a worker's pool has 64"):
        Simulator([Arrival(0.0, 65, 1)], costs, num_workers=1)
    with pytest.raises(ValueError, match="an encoder samples none"):
        Simulator([Arrival(0.0, 10, 2)], costs, num_workers=1)


def test_a_trace_is_read_with_times_after_its_first_request(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    assert read_trace(file, speedup=2) == [Arrival(0.0, 374, 44), Arrival(pytest.approx(2.15729), 396, 109)]
    assert len(read_trace(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: the columns"),
        ("a,b\n1,2\n", "line 1: the columns"),
        (HEADER, "has no requests"),
        (HEADER + "yesterday,1,1\n", "line 2: "),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,x,1\n", "line 3: "),
        (HEADER + "2023-11-16 18:15:46,0,1\n", "line 2: token counts must be at least 1"),
        (HEADER + "2023-11-16 18:15:46,1\n", "line 2: "),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", "line 3: .* times must not go back"),
    ],
)
def test_a_corrupt_trace_names_its_line(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "the fields of a cost model are"),
        ('{"speed": 1}', "the fields of a cost model are"),
        ('{"step_us": -1}', "step_us is -1; it must be a number of at least 0"),
        ('{"prefill_token_us": 0}', "prefill_token_us is 0; it must be a positive number"),
        ('{"step_us": NaN}', "step_us is nan"),
        ('{"block_size": "16"}', "block_size is '16'"),
        ('{"images_attend_both_ways": 1}', "images_attend_both_ways is 1; it must be true or false"),
        ('{"guesses": 1}', "guesses is 1; it must be a list of numbers from 0 to 1"),
        ('{"guesses": [0.5], "acceptance": [2]}', r"acceptance is \[2\]; it must be a list of numbers from 0 to 1"),
        ('{"acceptance": [true]}', r"acceptance is \[True\]"),
        ('{"acceptance": [0.5]}', "guesses and acceptance have different lengths"),
        ('{"layer_groups": [[0, 1]]}', r"layer_groups is \[\[0, 1\]\]; it must be a list of pairs"),
        ('{"layer_groups": [16]}', r"layer_groups is \[16\]"),
    ],
)
def test_a_cost_model_that_makes_no_sense_says_why(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        CostModel.read(file)


def test_the_command_prints_a_table_and_ends_with_json(tmp_path: Path) -> None:
    trace, costs = tmp_path / "trace.csv", tmp_path / "costs.json"
    trace.write_text(HEADER + "".join(f"2023-11-16 18:15:{s:02},20,5\n" for s in range(30)))
    costs.write_text('{"step_us": 5000}')
    command = [sys.executable, "-m", "scheduler_service.simulate", "--trace", str(trace), "--cost-model", str(costs)]
    options = ["--workers", "2", "--tenants", '{"a": 1, "b": 1}', "--priorities", '{"0": 1, "-5": 1}']
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert list(report) == ["fcfs", "priority", "fair"]
    assert report["fcfs"]["ttft"]["p50"] > 0.005
    assert set(report["fair"]["ttft_by_tenant"]) == {"a", "b"}
    assert list(report["fair"]["ttft_by_priority"]) == ["-5", "0"]
    assert "ttft by tenant b p99, s" in result.stdout
    trace.write_text("nonsense")
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1].startswith("scheduler_service.simulate: ")


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("--tenants", "3", "3 is not a JSON object of names and shares"),
        ("--tenants", "{", "{ is not a JSON object of names and shares"),
        ("--tenants", '{"a": -1}', "-1 is not a positive number"),
        ("--tenants", '{"a": "many"}', "many is not a number"),
        ("--priorities", '{"urgent": 1}', "urgent is not a whole number"),
    ],
)
def test_shares_that_make_no_sense_are_refused(
    option: str, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--trace", "trace.csv", option, text])
    assert reason in capsys.readouterr().err


def test_turns_continue_what_was_said_and_come_after_a_pause() -> None:
    arrivals = [Arrival(number * 1.0, 5 + number * 17 % 90, 1 + number % 9) for number in range(200)]
    turns = converse(arrivals, pause=10.0, most_turns=3)
    assert [turn._replace(conversation=None) for turn in turns] == arrivals
    said: dict[int | None, list[Arrival]] = {}
    for turn in turns:
        before = said.setdefault(turn.conversation, [])
        if before:
            assert turn.at >= before[-1].at + 10
            assert turn.prompt_tokens >= before[-1].prompt_tokens + before[-1].output_tokens
        before.append(turn)
    assert max(map(len, said.values())) == 3
    assert sum(len(turns) > 1 for turns in said.values()) > 20


def test_turns_of_a_conversation_find_what_was_computed_before_wherever_it_was() -> None:
    arrivals = [Arrival(number // 4 * 0.5, 8 + number // 4 * 8, 4, conversation=number % 4) for number in range(24)]
    result = Simulator(arrivals, COSTS, num_workers=4).run()
    assert result.cached_tokens >= 0.9 * sum(arrival.prompt_tokens - 8 for arrival in arrivals)


def test_a_slow_worker_gets_less() -> None:
    arrivals = [Arrival(number * 0.02, 20, 20) for number in range(300)]
    even = Simulator(arrivals, COSTS, num_workers=3).run()
    uneven = Simulator(arrivals, COSTS, num_workers=3, slowness={0: 5.0}).run()
    assert max(even.busy_seconds) < 1.3 * min(even.busy_seconds)
    assert uneven.busy_seconds[0] / 5 < 0.4 * min(uneven.busy_seconds[1:])
    assert uneven.busy_seconds[0] > 0
