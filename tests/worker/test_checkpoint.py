"""A sound directory is read exactly; anything wrong with one ends in a sentence that names the file."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire_common.errors import StartError
from worker_service.checkpoint import Checkpoint
from worker_service.models.llama import LlamaConfig, LlamaForCausalLM


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    places = LlamaForCausalLM(LlamaConfig.from_json(checkpoint.config), dtype, torch.device("cpu")).checkpoint_tensors()
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


def test_shards_are_found_through_the_index(path: Path) -> None:
    whole = load(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:7], names[7:])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, place in load(path).items():
        assert torch.equal(place, whole[name])


def test_an_index_cannot_point_out_of_its_folder(path: Path, tmp_path: Path) -> None:
    shutil.move(path / "model.safetensors", tmp_path / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartError, match=r"model/other\.safetensors does not exist"):
        Checkpoint(path)


def test_the_fingerprint_tells_networks_and_tokenizers_apart(
    path: Path, tiny_checkpoint: Path, make_checkpoint: Callable[..., Path]
) -> None:
    def fingerprint(path: Path) -> str:
        return Checkpoint(path).fingerprint([path / "tokenizer.json"])

    assert fingerprint(path) == fingerprint(tiny_checkpoint)
    assert fingerprint(path) != fingerprint(make_checkpoint(hidden_size=54))
    (path / "tokenizer.json").write_text("{}")
    assert fingerprint(path) != fingerprint(tiny_checkpoint)


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


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), r"cannot read .*config\.json: No such file"),
    "config is not JSON": (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
    "config is no object": (lambda path: (path / "config.json").write_text("[]"), r"config\.json does not hold"),
    "quantised": (lambda path: change_config(path, quantization_config={}), "quantised weights"),
    "odd dtype": (lambda path: change_config(path, dtype="float8"), "dtype float8 is not supported"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
    "bad index": (
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        "there is no weight_map",
    ),
    "empty weights": (lambda path: (path / "model.safetensors").write_bytes(b""), "not a sound safetensors file"),
    "truncated weights": (truncate, "not a sound safetensors file"),
    "huge header": (claim_a_huge_header, "not a sound safetensors file"),
    "missing tensor": (without_a_tensor, r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    "misshapen tensor": (
        lambda path: change_config(path, intermediate_size=99),
        r"\.mlp\.\w+\.weight is \[100, 48\] of torch.float32 where config.json asks for \[99, 48\]",
    ),
    "integers": (with_integers, r"model\.norm\.weight is \[48\] of torch.int8"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_directory_is_refused_with_a_sentence(name: str, path: Path) -> None:
    spoil, sentence = SPOILED[name]
    spoil(path)
    with pytest.raises(StartError, match=sentence):
        load(path, Checkpoint(path).dtype)


def test_weights_that_may_not_be_read_say_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake of os.access, because whoever runs the tests may be allowed to read everything."""
    monkeypatch.setattr("os.access", lambda file, mode: False)
    with pytest.raises(StartError, match=r"model\.safetensors may not be read by this user"):
        Checkpoint(path)


def test_a_fingerprint_reads_no_header_beyond_the_file(path: Path) -> None:
    claim_a_huge_header(path)
    with pytest.raises(StartError, match="its header claims"):
        Checkpoint(path).fingerprint([])
