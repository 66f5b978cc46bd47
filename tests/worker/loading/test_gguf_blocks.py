"""What is kept of a GGUF file's quantised weights is what the library gguf makes of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import save_file
from small_gguf import QUANTIZED, convert_in_this_process, write_gguf
from transformers import AutoModelForCausalLM

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.gguf.blocks import FILE, TYPES, GgufBlocks, grouped_weight
from worker_service.loading.model_store import find_model
from worker_service.loading.quantized.packed_weights import widened
from worker_service.models.layers.linear import can_pack

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
    rows = random_rows(kind)
    exact = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    found = grouped_weight(torch.from_numpy(rows), kind)
    assert int(found.numbers.max()) < 2**found.bits
    assert found.numbers.shape == exact.shape
    torch.testing.assert_close(widened(found), exact, atol=0, rtol=0)


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_that_are_no_weights_are_refused(kind: str) -> None:
    rows = torch.from_numpy(random_rows(kind))
    for wrong in (rows[:, 1:], rows[0], rows.int(), rows[:0], rows[:, :0]):
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
    with pytest.MonkeyPatch.context() as patch:
        convert_in_this_process(patch)
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


def test_layers_that_are_equal_all_keep_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a model that was made deeper by repeating its layers."""
    convert_in_this_process(monkeypatch)
    write_gguf(tmp_path / "small.gguf", quantized=QUANTIZED, equal_layers=True)
    found = GgufBlocks(find_model(str(tmp_path / "small.gguf"), tmp_path / "cache").path)
    assert len(found) == 1 + 2 * (len(QUANTIZED) - 1)
    for name in found:
        if "layers.0." in name:
            assert torch.equal(found[name].numbers, found[name.replace("layers.0.", "layers.1.")].numbers)


def test_a_model_says_with_its_files_weights_what_it_says_with_them_widened(converted: Path) -> None:
    if not can_pack(torch.device("cpu"), torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")
    plain = prompt_logprobs(worker_settings(converted, "none"))
    quantized = prompt_logprobs(worker_settings(converted, "gguf"))
    assert not torch.equal(plain, quantized)  # inputs are rounded to 8 bits
    # Such random weights make much of small errors: 0.6 here, and 8 between any two tokens.
    assert (quantized - plain).abs().mean() < 0.15 * plain.std()


def test_what_has_no_such_weights_is_refused_with_the_reason(
    converted: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_in_this_process(monkeypatch)
    if not can_pack(torch.device("cpu"), torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")
    with pytest.raises(StartError, match="was not converted from a GGUF file"):
        load_worker(worker_settings(tiny_checkpoint, "gguf"))
    write_gguf(tmp_path / "plain.gguf")
    with pytest.raises(StartError, match="was not converted from a GGUF file with weights of Q4_0, Q4_1, Q4_K"):
        load_worker(worker_settings(tmp_path / "plain.gguf", "gguf", cache=tmp_path))
    (converted / FILE).write_bytes(b"\x10" * 100)
    with pytest.raises(StartError, match=f"{FILE} is not a sound safetensors file: its header claims"):
        load_worker(worker_settings(converted, "gguf"))


@pytest.mark.parametrize(
    ("types", "reason"),
    [(None, "the type of a is ''"), ({"b": "Q4_K"}, "the type of a is ''"), ({"a": "Q9"}, "the type of a is 'Q9'")],
)
def test_blocks_of_no_known_type_are_refused(types: dict[str, str] | None, reason: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 144, dtype=torch.uint8)}, tmp_path / FILE, types)
    with pytest.raises(StartError, match=f"{FILE} cannot be read: {reason}"):
        GgufBlocks(tmp_path)


def test_what_is_hashed_is_what_is_loaded(tmp_path: Path) -> None:
    """A file that is cut or replaced while a worker starts ends the start, and not the process."""
    file = tmp_path / FILE
    rows = {"a": torch.zeros(2, 144, dtype=torch.uint8), "b": torch.zeros(2, 144, dtype=torch.uint8)}
    save_file(rows, file, dict.fromkeys(rows, "Q4_K"))
    found, content = GgufBlocks(tmp_path), file.read_bytes()
    found.digest()
    file.write_bytes(content[:-200])
    with pytest.raises(StartError, match=r"ends inside the tensor|was changed while it was read"):
        [found[name] for name in "ab"]
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(StartError, match="was changed while it was read"):
        found["a"]
    GgufBlocks(tmp_path).digest()


def test_blocks_of_another_type_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 144, dtype=torch.int8)}, tmp_path / FILE, {"a": "Q4_K"})
    with pytest.raises(StartError, match=r"the blocks of a are I8"):
        GgufBlocks(tmp_path).digest()


def test_the_digest_is_of_the_blocks_however_the_file_orders_them(tmp_path: Path) -> None:
    """safetensors writes metadata in another order each time, and workers that converted a file serve together."""
    names = [f"layer {number}" for number in range(8)]
    rows = {name: torch.full((2, 144), number, dtype=torch.uint8) for number, name in enumerate(names)}
    others = rows | {names[0]: rows[names[1]], names[1]: rows[names[0]]}

    def digest(blocks: dict[str, torch.Tensor], types: dict[str, str]) -> str:
        save_file(blocks, tmp_path / FILE, types)
        return GgufBlocks(tmp_path).digest()

    types = dict.fromkeys(names, "Q4_K")
    assert len({digest(rows, types) for _ in range(8)}) == 1
    assert (
        len({digest(blocks, kinds) for blocks in (rows, others) for kinds in (types, types | {names[0]: "Q4_0"})}) == 4
    )
