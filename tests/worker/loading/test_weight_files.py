"""Weights are read into places that exist already, whatever view of memory those are, and never lie in memory twice."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire_common.start_error import StartError
from worker_service.loading.files import weight_files
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.parallel.cut import Cut

MEASURE = """
import sys
from pathlib import Path
import torch
from worker_service.loading.files.weight_files import WeightFiles

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

places = {f"t{number}": torch.empty(4, 2**20, dtype=getattr(torch, sys.argv[2])) for number in range(12)}
before = peak()
WeightFiles(Path(sys.argv[1])).load_into(places)
print(peak() - before, all(bool((place == 0).all()) for place in places.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of memory")
@pytest.mark.parametrize(("dtype", "place_megabytes"), [("float32", 201), ("bfloat16", 101)])
def test_weights_are_in_memory_once(dtype: str, place_megabytes: int, tmp_path: Path) -> None:
    """201 MB of float32 on disk; a second copy of them, or a mapping of the file, would count as much again."""
    size = 4 * 4 * 2**20
    header = json.dumps(
        {
            f"t{number}": {"dtype": "F32", "shape": [4, 2**20], "data_offsets": [number * size, (number + 1) * size]}
            for number in range(12)
        }
    ).encode()
    with open(tmp_path / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + 12 * size)  # zeros that take no space on disk
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    growth, is_zero = output.split()
    assert is_zero == "True"
    assert place_megabytes * 1e6 <= int(growth) < place_megabytes * 1e6 + 40e6


@pytest.mark.parametrize("piece_bytes", [1, 12, 100, 1 << 20])
def test_tensors_of_any_shape_land_in_views_of_any_kind(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", piece_bytes)
    tensors = {
        "matrix": torch.randn(7, 5),
        "transposed": torch.randn(7, 5, dtype=torch.float64),
        "vector": torch.randn(11).to(torch.bfloat16),
        "strided": torch.randn(6).to(torch.float16),
        "cube": torch.randn(3, 4, 5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    places = {
        "matrix": torch.empty(20, 5)[3:10],
        "transposed": torch.empty(5, 7).T,
        "vector": torch.empty(11),
        "strided": torch.empty(6, 2)[:, 1],
        "cube": torch.empty(3, 4, 5, dtype=torch.bfloat16),
        "scalar": torch.empty(()),
        "empty": torch.empty(0, 3),
    }
    WeightFiles(tmp_path).load_into(places)
    for name, place in places.items():
        assert torch.equal(place, tensors[name].to(place.dtype)), name


def test_no_progress_is_drawn_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    WeightFiles(tmp_path).load_into({"a": torch.empty(3)})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("piece_bytes", [1, 12, 100, 1 << 20])
def test_only_the_held_parts_of_tensors_are_read(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", piece_bytes)
    tensors = {
        "rows": torch.randn(9, 5),
        "columns": torch.randn(7, 10).to(torch.bfloat16),
        "stretches": torch.randn(20, 3),
        "vector": torch.randn(11),
        "nothing": torch.randn(4, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    cuts = {
        "rows": Cut((9, 5), [range(2, 6)], range(5)),
        "columns": Cut((7, 10), [range(7)], range(3, 8)),
        "stretches": Cut((20, 3), [range(1, 4), range(10, 11), range(15, 20)], range(1, 3)),
        "vector": Cut((11,), [range(5, 11)], range(1)),
        "nothing": Cut((4, 4), [range(4, 4)], range(4)),
    }
    sizes = {"rows": (4, 5), "columns": (7, 5), "stretches": (9, 2), "vector": (6,), "nothing": (0, 4)}
    places = {name: torch.empty(size) for name, size in sizes.items()}
    read: list[int] = []
    read_exactly = weight_files._read_exactly
    monkeypatch.setattr(weight_files, "_read_exactly", lambda *args: (read.append(len(args[2])), read_exactly(*args)))
    WeightFiles(tmp_path).load_into(places, cuts)
    for name, place in places.items():
        assert torch.equal(place, cuts[name].of(tensors[name]).float()), name
    assert sum(read) == sum(math.prod(size) * tensors[name].itemsize for name, size in sizes.items())


def test_the_whole_of_a_tensor_that_is_held_in_part_must_have_the_shape_that_is_asked_for(tmp_path: Path) -> None:
    save_file({"a": torch.randn(9, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"tensor a is \[9, 5\] of F32 where config.json asks for \[8, 5\]"):
        WeightFiles(tmp_path).check({"a": torch.empty(4, 5)}, {"a": Cut((8, 5), [range(4)], range(5))})


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["pytorch_model.bin"], r"are pickles \(pytorch_model.bin\), which can run code"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "-00001-of-00002.bin and 1 more"),
        (["consolidated.00.pth"], r"are pickles \(consolidated.00.pth\)"),
        (["training_args.bin"], "model.safetensors does not exist; .* If the model has .bin"),
        ([], "model.safetensors does not exist; .* If the model has .bin"),
    ],
)
def test_weights_that_are_pickles_are_refused_with_how_to_convert_them(
    files: list[str], sentence: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"not to be read")
    with pytest.raises(StartError, match=rf"{sentence}.*M\.from_pretrained\('FOLDER', dtype='auto'\)\.save_pretrained"):
        WeightFiles(tmp_path)


def test_safetensors_beside_a_pickle_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not to be read")
    assert list(WeightFiles(tmp_path).dtypes) == ["a"]
