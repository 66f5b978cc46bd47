"""A token's logits have the same bits whatever is beside it: on a CPU always, on a GPU with `--batch-invariant`.

On a GPU with its own kernels, CUDA graphs included; without one, in Triton's interpreter, and on a CPU with the CPU's.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_networks import NATIVE
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner
from torch import Tensor
from worker_helpers import new_sequence

from kernels import backends
from pagewire_common.start_error import StartError
from worker_service.execution.startup import unsupported
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.worker import load_worker
from worker_service.settings import WorkerSettings

LONG = [token_id for number in range(14) for token_id in PROMPT[number:]][:300]


@pytest.fixture(params=["own kernels", "interpreted"])
def backend(request: pytest.FixtureRequest) -> str:
    """The device's kernels, or those of GPUs in the interpreter."""
    if request.param == "interpreted":
        if DEVICE.type != "cpu":
            pytest.skip("the kernels of GPUs run on the GPU that is here")
        request.getfixturevalue("interpreted")
    return str(request.param)


class Watched:
    """A runner whose logits are kept, by sequence and position."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = SteppedWorker(runner)
        self._logits: list[Tensor] = []
        compute = runner.model.compute_logits
        monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: self._keep(compute(hidden)))

    def _keep(self, logits: Tensor) -> Tensor:
        self._logits.append(logits.clone())
        return logits

    def taken(self) -> Tensor:
        """Those of the steps since the last call, [rows, vocabulary_size]."""
        found, self._logits = torch.cat(self._logits), []
        return found


@pytest.mark.parametrize("family", [{}, {"model_type": "mistral", "sliding_window": 6}, NATIVE["deepseek_v3, groups"]],
                         ids=["llama", "a window", "latents"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits_are_the_same_alone_together_and_in_chunks(
    backend: str,
    dtype: torch.dtype,
    family: dict[str, object],
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "interpreted" and dtype is not torch.float32:
        pytest.skip("in Triton's interpreter, no type takes another path, and float32 rounds least")
    if backend == "interpreted" and "kv_lora_rank" in family:
        pytest.skip("it takes 7 s, and test_triton_latents.py compares bits")
    if backend == "own kernels" and backends.backend_name(DEVICE) == backends.EAGER:
        pytest.skip("eager torch computes here, which does not promise it")
    asks = backend == "interpreted" or DEVICE.type != "cpu"
    runner = load_runner(make_checkpoint(**family | {"num_hidden_layers": 1}), dtype=dtype, batch_invariant=asks)
    watched = Watched(runner, monkeypatch)
    worker, prompt = watched.worker, LONG[:50]
    worker.step((1, len(prompt), True), new_sequences=(new_sequence(1, prompt, range(18)),))
    expected_tokens = worker.generate(1, 3)
    expected = watched.taken()

    others = [new_sequence(number, LONG[number : number + 9 * number], range(10 + 10 * number, 20 + 10 * number))
              for number in (2, 3)]  # fmt: skip
    worker = watched.worker = SteppedWorker(runner)
    worker.step((2, 18, True), (3, 5, False), new_sequences=tuple(others))
    watched.taken()
    worker.step((2, 1, True), (1, 7, False), (3, 1, False), new_sequences=(new_sequence(1, prompt, range(18)),))
    worker.step((1, 36, False), (2, 1, True))
    watched.taken()
    worker.step((2, 1, True), (1, 7, True), (3, 21, True))
    found = [watched.taken()[1]]
    said = []
    for _ in range(3):
        said.append(worker.step((3, 1, True), (1, 1, True), (2, 1, True)).token_ids[1])
        found.append(watched.taken()[1])
    assert torch.equal(torch.stack(found), expected)
    assert said == expected_tokens


def test_a_worker_that_cannot_keep_the_promise_does_not_start(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model_type: str = "llama", **settings: object) -> None:
        path = make_checkpoint(model_type=model_type)
        load_worker(
            WorkerSettings(model=str(path), device="cpu", num_gpu_blocks_override=64, batch_invariant=True, **settings)
        )

    with pytest.raises(StartError, match="--batch-invariant is for the families that run natively"):
        load("starcoder2")
    monkeypatch.setattr(unsupported, "backend_name", lambda _: backends.EAGER)
    with pytest.raises(StartError, match="--batch-invariant needs compiled kernels"):
        load()


def test_workers_with_the_promise_do_not_serve_together_with_others(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if backends.backend_name(torch.device("cpu")) == backends.EAGER:
        pytest.skip("eager torch computes here, which does not promise it")
    model = str(make_checkpoint())
    common = {"model": model, "device": "cpu", "num_gpu_blocks_override": 64, "cache": tmp_path}
    workers = [load_worker(WorkerSettings(**common, batch_invariant=promises)) for promises in (False, True, True)]
    first, second, third = (worker.info.model_fingerprint for worker in workers)
    assert first != second
    assert second == third
