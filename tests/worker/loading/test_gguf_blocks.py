"""What is kept of a GGUF file's quantised weights is what the library gguf makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_gguf import QUANTIZED, write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker_helpers import tokens

from kernels.ops import GroupedWeight
from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.gguf_blocks import FILE, TYPES, GgufBlocks, grouped_weight
from worker_service.loading.model_store import find_model
from worker_service.models.linear import Quantization, can_pack
from worker_service.session.session import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams, SchedulerOutput
from worker_service.settings import WorkerSettings

gguf = pytest.importorskip("gguf")

BYTES = {
    "Q4_0": (18, (0,)),
    "Q4_1": (20, (0, 2)),
    "Q5_0": (22, (0,)),
    "Q5_1": (24, (0, 2)),
    "Q8_0": (34, (0,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}
"""Of a block, and where in it the scales in float16 are."""


def widened(weight: GroupedWeight) -> Tensor:
    inputs = weight.numbers.shape[1] // weight.scales.shape[1]
    scales, minimums = (part.float().repeat_interleave(inputs, dim=1) for part in weight[1:3])
    return weight.numbers * scales - minimums


def random_rows(kind: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """Seven outputs of three blocks, with scales as weights have them, and all else any bytes."""
    draw = np.random.default_rng(0)
    num_bytes, scales = BYTES[kind]
    rows = draw.integers(0, 256, (7, 3, num_bytes), dtype=np.uint8)
    for place in scales:
        rows[:, :, place : place + 2] = draw.normal(0, 0.01, (7, 3, 1)).astype(np.float16).view(np.uint8)
    return rows.reshape(7, -1)


def test_every_type_is_tried() -> None:
    assert set(BYTES) == TYPES


@pytest.mark.parametrize("kind", BYTES)
def test_blocks_mean_what_the_library_makes_of_them(kind: str) -> None:
    """Products of two scales are rounded to float16."""
    rows = random_rows(kind)
    exact = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    found = grouped_weight(torch.from_numpy(rows), kind)
    assert int(found.numbers.max()) < 2**found.bits
    assert found.numbers.shape == exact.shape
    tolerance = 2**-10 * float(exact.abs().max()) if kind.endswith("K") else 0
    torch.testing.assert_close(widened(found), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_that_are_no_weights_are_refused(kind: str) -> None:
    rows = torch.from_numpy(random_rows(kind))
    for wrong in (rows[:, 1:], rows[0], rows.int()):
        with pytest.raises(ValueError, match=f"are no blocks of {kind}"):
            grouped_weight(wrong, kind)
    place = BYTES[kind][1][0]
    rows[3, place : place + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity in float16
    with pytest.raises(ValueError, match=f"a scale of {kind} is not finite"):
        grouped_weight(rows, kind)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose file has weights of several types, and some in float32."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "small.gguf", quantized=QUANTIZED)
    return find_model(str(folder / "small.gguf"), folder / "cache").path


def test_a_conversion_keeps_each_quantised_weight_under_its_new_name(converted: Path) -> None:
    """Also those whose rows it puts into another order, such as a Llama's queries and keys."""
    weights = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).state_dict()
    found = GgufBlocks(converted)
    assert len(found) == 1 + 2 * (len(QUANTIZED) - 1)
    assert {name.rpartition("layers.1.")[2] for name in found if "layers.1." in name} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up")),
    }
    for name, weight in found.items():
        assert torch.equal(widened(weight).bfloat16().float(), weights[name]), name


def prompt_logprobs(settings: WorkerSettings) -> Tensor:
    """Of the tokens of a prompt but the first."""
    prompt = tokens(range(3, 40))
    sequence = SequenceState(
        sequence_id=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=tokens(range(len(prompt))),
        sampling=SamplingParams(prompt_logprobs=0),
    )
    chunk = ScheduledChunk(sequence, start=0, stop=len(prompt) - 1, samples=False)
    (report,) = load_worker(settings).runner.execute(SchedulerOutput(epoch=0, step_id=0), [chunk]).prompt_logprobs
    return torch.tensor(report.logprobs)


def worker_settings(path: Path, quantization: Quantization, **settings: Any) -> WorkerSettings:
    return WorkerSettings(
        model=str(path), device="cpu", dtype="bfloat16", quantization=quantization, num_device_blocks=40, **settings
    )


def test_a_model_says_with_its_files_weights_what_it_says_with_them_widened(converted: Path) -> None:
    if not can_pack(torch.device("cpu"), torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")
    plain = prompt_logprobs(worker_settings(converted, "none"))
    quantized = prompt_logprobs(worker_settings(converted, "gguf"))
    assert not torch.equal(plain, quantized)  # inputs are rounded to 8 bits
    # Such random weights make much of small errors: 0.6 here, and 8 between any two tokens.
    assert (quantized - plain).abs().mean() < 0.15 * plain.std()


def test_what_has_no_such_weights_is_refused_with_the_reason(
    converted: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    if not can_pack(torch.device("cpu"), torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")
    with pytest.raises(StartError, match="was not converted from a GGUF file"):
        load_worker(worker_settings(tiny_checkpoint, "gguf"))
    write_gguf(tmp_path / "plain.gguf")
    with pytest.raises(StartError, match="was not converted from a GGUF file with weights of Q4_0, Q4_1, Q4_K"):
        load_worker(worker_settings(tmp_path / "plain.gguf", "gguf", cache=tmp_path))
    (converted / FILE).write_bytes(b"\x10" * 100)
    with pytest.raises(StartError, match=f"{FILE} cannot be read"):
        load_worker(worker_settings(converted, "gguf"))
