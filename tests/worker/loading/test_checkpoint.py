"""A sound directory is read exactly; anything wrong with one ends in a sentence that names the file."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.files.safetensors_header import read_header
from worker_service.models.registry import build_model, read_config
from worker_service.settings import WorkerSettings


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    places = build_model(read_config(checkpoint.config), dtype, torch.device("cpu")).checkpoint_tensors()
    checkpoint.load_into(places)
    return places


@pytest.fixture
def path(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_lands_in_its_place(path: Path, dtype: torch.dtype) -> None:
    stored = load_file(path / "model.safetensors")
    places = load(path, dtype)
    assert places.keys() == stored.keys()
    for name, place in places.items():
        assert torch.equal(place, stored[name].to(dtype)), name


def split(path: Path) -> dict[str, str]:
    """Cut the weights into two shards; returns the index's map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shard_of = {}
    for number, part in enumerate((names[:7], names[7:])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        shard_of |= dict.fromkeys(part, file)
    write_index(path, shard_of)
    return shard_of


def write_index(path: Path, shard_of: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))


def test_shards_are_found_through_the_index(path: Path) -> None:
    whole = load(path)
    split(path)
    for name, place in load(path).items():
        assert torch.equal(place, whole[name])


def test_of_two_shards_with_the_same_tensor_the_index_chooses(path: Path) -> None:
    shard_of = split(path)
    name = next(name for name, shard in shard_of.items() if shard == "model-0.safetensors")
    second = load_file(path / "model-1.safetensors")
    save_file(second | {name: torch.zeros_like(load(path)[name])}, path / "model-1.safetensors")
    assert load(path)[name].any()
    write_index(path, shard_of | {name: "model-1.safetensors"})
    assert not load(path)[name].any()


def test_an_index_cannot_point_out_of_its_folder(path: Path, tmp_path: Path) -> None:
    shutil.move(path / "model.safetensors", tmp_path / "other.safetensors")
    write_index(path, {"model.norm.weight": "../other.safetensors"})
    with pytest.raises(
        StartError, match=r"model/other\.safetensors, which model\.safetensors\.index\.json names, does not exist"
    ):
        Checkpoint(path)


def fingerprint(path: Path, dtype: torch.dtype = torch.float32, quantization: str = "none") -> str:
    return Checkpoint(path).fingerprint([path / "tokenizer.json"], dtype, quantization)


def test_the_fingerprint_tells_networks_and_tokenizers_apart(
    path: Path, tiny_checkpoint: Path, make_checkpoint: Callable[..., Path]
) -> None:
    assert fingerprint(path) == fingerprint(tiny_checkpoint)
    assert fingerprint(path) != fingerprint(make_checkpoint(hidden_size=54))
    assert fingerprint(path) != fingerprint(path, quantization="int8")
    assert fingerprint(path) != fingerprint(path, torch.bfloat16)
    (path / "tokenizer.json").write_text("{}")
    assert fingerprint(path) != fingerprint(tiny_checkpoint)


def test_weights_of_other_values_have_another_fingerprint(path: Path) -> None:
    """The header is the same to the byte: only the data tells a fine-tune from the model that it was made of."""
    before, header = fingerprint(path), read_header(path / "model.safetensors").content
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor * -3 for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    assert read_header(path / "model.safetensors").content == header
    assert fingerprint(path) != before


def test_any_byte_of_any_weight_makes_another_fingerprint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_service.loading.files.tensor_digests._PIECE_BYTES", 1000)
    file = path / "model.safetensors"
    content, found = file.read_bytes(), {fingerprint(path)}
    begin = len(content) - sum(tensor.num_bytes for tensor in read_header(file).tensors.values())
    positions = [begin, len(content) - 1, *range(begin + 999, len(content), len(content) // 30)]
    for position in positions:
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        found.add(fingerprint(path))
    assert len(found) == 1 + len(positions)


def test_equal_data_under_swapped_names_is_another_model(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    before = fingerprint(path)
    save_file(tensors | {up: tensors[gate], gate: tensors[up]}, path / "model.safetensors")
    assert fingerprint(path) != before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_fingerprint_is_of_what_weights_are_and_not_of_how_they_are_kept(path: Path, num_threads: int) -> None:
    """Neither shards, nor the order in a file, nor metadata, nor threads and their pieces make a difference."""
    expected = fingerprint(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert fingerprint(path) == expected
        split(path)
        assert fingerprint(path) == expected
    finally:
        torch.set_num_threads(threads)


def test_files_that_change_while_they_are_read_are_refused(path: Path) -> None:
    """Otherwise the loaded and the hashed weights could be two models."""
    checkpoint, places = Checkpoint(path), load(path)
    checkpoint.check(places)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    os.utime(path / "model.safetensors", (0, 0))  # for the clock of some file systems ticks slowly
    for read in (lambda: checkpoint.fingerprint([], torch.float32, "none"), lambda: checkpoint.load_into(places)):
        with pytest.raises(StartError, match=r"model\.safetensors was changed while it was read; start again"):
            read()


def truncate(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])


def claim_a_huge_header(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + content[8:])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def with_integers(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors")


def without_a_shard(path: Path) -> None:
    split(path)
    (path / "model-1.safetensors").unlink()


def with_a_tensor_in_the_wrong_shard(path: Path) -> None:
    write_index(path, split(path) | {"model.norm.weight": "model-0.safetensors"})


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), r"cannot read .*config\.json: No such file"),
    "config is not JSON": (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
    "config is no object": (lambda path: (path / "config.json").write_text("[]"), r"config\.json does not hold"),
    "generation config is not JSON": (
        lambda path: (path / "generation_config.json").write_text("{"),
        r"generation_config\.json is not JSON",
    ),
    "generation config is no object": (
        lambda path: (path / "generation_config.json").write_text("3"),
        r"generation_config\.json does not hold",
    ),
    "quantised": (lambda path: change_config(path, quantization_config={}), "quantised by None are not read"),
    "quantised in words": (lambda path: change_config(path, quantization_config="yes"), "it must be an object"),
    "odd dtype": (lambda path: change_config(path, dtype="float8"), "dtype 'float8' is not supported"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
    "bad index": (lambda path: write_index(path, 3), "there is no weight_map"),
    "missing shard": (without_a_shard, r"model-1\.safetensors, which .*index\.json names, does not exist"),
    "wrong shard": (
        with_a_tensor_in_the_wrong_shard,
        r"model-0\.safetensors lacks the tensor model\.norm\.weight, which .*index\.json says is there",
    ),
    "config of endless depth": (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        r"config\.json is not JSON",
    ),
    "empty weights": (lambda path: (path / "model.safetensors").write_bytes(b""), "not a sound safetensors file"),
    "truncated weights": (truncate, r"not a sound safetensors file: tensor .* ends at byte \d+, and the file has \d+"),
    "huge header": (claim_a_huge_header, "not a sound safetensors file: its header claims 46116"),
    "missing tensor": (
        without_a_tensor,
        r"model\.safetensors: the weights lack the tensor model\.layers\.1\.mlp\.up_proj",
    ),
    "misshapen tensor": (
        lambda path: change_config(path, intermediate_size=99),
        r"\.mlp\.\w+\.weight is \[100, 48\] of F32 where config.json asks for \[99, 48\]",
    ),
    "integers": (with_integers, r"model\.norm\.weight is \[48\] of I8"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_directory_is_refused_with_a_sentence(name: str, path: Path) -> None:
    spoil, sentence = SPOILED[name]
    spoil(path)
    with pytest.raises(StartError, match=sentence):
        load(path, Checkpoint(path).dtype)


def test_weights_are_found_wrong_before_memory_is_asked_for(path: Path, tmp_path: Path) -> None:
    """Otherwise the error would be about 20 exabytes of weights."""
    change_config(path, hidden_size=2**20, num_hidden_layers=512, intermediate_size=2**24)
    with pytest.raises(StartError, match=r"model\.embed_tokens\.weight is \[131, 48\] of F32 .* \[131, 1048576\]"):
        load_worker(WorkerSettings(model=str(path), device="cpu", cache=tmp_path))


def test_a_value_that_no_network_has_is_named_with_the_file(path: Path, tmp_path: Path) -> None:
    change_config(path, hidden_size=48.5)
    with pytest.raises(StartError, match=r"model/config\.json: hidden_size is 48\.5; it must be a whole number from 1"):
        load_worker(WorkerSettings(model=str(path), device="cpu", cache=tmp_path))


def test_a_file_that_shrinks_while_it_is_read_is_one_sentence(path: Path) -> None:
    checkpoint = Checkpoint(path)
    places = load(path)
    checkpoint.check(places)
    truncate(path)
    with pytest.raises(StartError, match=r"model\.safetensors ends inside the tensor model\.norm\.weight"):
        checkpoint.load_into(places)


def test_weights_that_may_not_be_read_say_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.access is a fake, because the user that runs the tests may be allowed to read everything."""
    monkeypatch.setattr("os.access", lambda file, mode: False)
    with pytest.raises(StartError, match=r"model\.safetensors may not be read by this user"):
        Checkpoint(path)


def test_a_fingerprint_reads_no_header_beyond_the_file(path: Path) -> None:
    claim_a_huge_header(path)
    with pytest.raises(StartError, match="its header claims"):
        fingerprint(path)
