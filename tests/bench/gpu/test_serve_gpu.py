"""A run beside vLLM, with systems that fit on a screen in place of both."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from bench.gpu import serve_gpu
from bench.gpu.memory import measure_copy
from bench.gpu.rows import read_rows
from bench.gpu.serve_gpu import CONTEXT, LOADS, main, parse_arguments, row_of, vllm_in
from bench.loads.drive import BenchError, Stream
from bench.loads.figures import Figures, Run, Timeline
from bench.loads.load import Load, shared_prefix, streams
from bench.measurements.measure import Measurement
from bench.measurements.phases import PHASES, Split

FIGURES = Figures(3000.0, 6000.0, 40.0, 90.0, 6.5, 6.0, 9.0, 512.0)


class OneSystem:
    """Sends tokens one by one."""

    name = "pagewire"
    start_seconds = 1.5
    num_up = 0

    def pids(self) -> list[int]:
        return []

    def __enter__(self) -> Self:
        OneSystem.num_up += 1
        assert OneSystem.num_up == 1
        return self

    def __exit__(self, *_: object) -> None:
        OneSystem.num_up -= 1

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            assert max(prompt) < 2048
            for _ in range(output_tokens):
                await asyncio.sleep(0)
                yield 1

        yield stream


class Failing(OneSystem):
    def __enter__(self) -> Self:
        raise BenchError("vLLM ended with status 1")


def measured(split: Split | None) -> Measurement:
    """A request whose first token took half a second, and the others 6 ms each, although two of them come together."""
    timeline = Timeline(0.0, 128, [(0.5 + 0.012 * number, 2) for number in range(64)])
    return Measurement(runs={"pagewire": [Run(2.0, [timeline])]}, figures={"pagewire": FIGURES}, split=split)


def of_load(load: Load, split: Split | None = None) -> serve_gpu.Row:
    return row_of("llama-8b", load, OneSystem(), measured(split), "H200", 4e12)  # type: ignore[arg-type]


def test_a_step_and_its_limit_are_those_of_all_sequences_in_the_middle_of_their_outputs() -> None:
    row = of_load(streams(128, 128, 32, num_requests=64))
    assert row.limit_ms == pytest.approx(1e3 * (15.0e9 + 32 * 192 * 2**17) / 4e12, rel=0.01)
    assert row.step_ms == pytest.approx(6)
    for load in (streams(1024, 128, 32, num_requests=64), shared_prefix(4096, 128, 128, num_requests=4)):
        assert of_load(load).limit_ms is of_load(load).step_ms is None


def test_the_gpu_is_idle_for_what_the_steps_do_not_take_of_the_whole_load() -> None:
    """200 steps of 8 ms, in 2 s: two of each ten milliseconds are idle."""
    split = Split(200, dict.fromkeys(PHASES, 0.0) | {"forward": 7000.0, "sample": 1000.0})
    row = of_load(LOADS[0], split)
    assert (row.idle_us, row.idle_percent) == (pytest.approx(2000), pytest.approx(20))
    assert of_load(LOADS[0]).idle_us is None


def test_systems_are_up_one_at_a_time_and_each_load_is_written_down_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_gpu, "systems", lambda model, device, peer: iter([OneSystem, OneSystem, Failing]))
    monkeypatch.setattr(serve_gpu, "measure_copy", lambda device: ("made up", 1e12))
    monkeypatch.setattr("bench.measurements.measure.PAUSE_SECONDS", 0.0)
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", "--models", "tiny", "--loads", "128x1,128x32", "--output", str(file)])
    with pytest.raises(SystemExit, match=r"bench serve_gpu: vLLM ended with status 1"):
        main()
    assert [row.load for row in read_rows(file)] == ["128/128 x 1", "128/128 x 32"] * 2
    said = capsys.readouterr().out.splitlines()
    assert len(json.loads(said[-1])) == 4
    monkeypatch.setattr(sys, "argv", ["x", "--show", str(file)])
    main()
    assert capsys.readouterr().out.splitlines() == said


def test_every_load_fits_into_the_context() -> None:
    assert max(one.prompt_tokens + one.output_tokens for load in LOADS for one in load.arrivals) == CONTEXT
    assert len({load.name for load in LOADS}) == len(LOADS)


@pytest.mark.parametrize(
    ("flag", "value", "reason"), [("--models", "gpt", "no model 'gpt'"), ("--loads", "9", "no load '9'")]
)
def test_unknown_names_are_refused_with_those_that_there_are(
    flag: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", flag, value])
    with pytest.raises(
        SystemExit, match=rf"there is {reason} here, but .*128x1|there is {reason} here, but .*llama-1b"
    ):
        main()


def test_vllm_is_what_was_unpacked_or_a_virtual_environment(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"neither venv/ nor vllm/vllm/"):
        vllm_in(tmp_path)
    (tmp_path / "vllm/vllm").mkdir(parents=True)
    program, environment = vllm_in(tmp_path)
    assert program == [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    assert environment == {"PYTHONPATH": str(tmp_path / "vllm"), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    (tmp_path / "venv").mkdir()
    assert vllm_in(tmp_path)[0] == [tmp_path / "venv/bin/vllm"]


def test_a_copy_is_measured_in_a_process_of_its_own() -> None:
    device, bandwidth = measure_copy("cpu")
    assert device.endswith("CPU threads")
    assert bandwidth > 1e8


def test_a_run_is_of_all_loads_and_models_but_the_tiny_one() -> None:
    arguments = parse_arguments([])
    assert arguments.loads is None
    assert "tiny" not in arguments.models
