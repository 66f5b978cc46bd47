"""Archives of wheels that are made here, cut, brought in any order, and joined."""

import json
import random
import zipfile
from pathlib import Path

import pytest

from bench.gpu.pieces import PieceError, cut, join, read_manifest, write_archive, write_manifest


def wheel(folder: Path, name: str, **files: bytes) -> Path:
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return file


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Two parts: one of at least three pieces, and one of a single piece."""
    folder = tmp_path / "pack"
    folder.mkdir()
    large = random.Random(0).randbytes(3000)  # does not compress
    wheels = {
        "vllm": wheel(tmp_path, "vllm", **{"vllm/__init__.py": b"ANSWER = 42\n", "vllm/_C.so": large}),
        "pagewire": wheel(tmp_path, "logs", **{"logs.py": b"import json\n"}),
    }
    parts = []
    for name, file in wheels.items():
        write_archive(folder / f"{name}.zip", [file], {})
        parts.append(cut(folder / f"{name}.zip", folder, 1000, {name: "1.0"}))
    write_manifest(folder, parts)
    return folder


def names_of(pack: Path, part: str) -> list[str]:
    return [piece.name for found in read_manifest(pack) if found.name == part for piece in found.pieces]


def test_pieces_are_no_larger_than_asked_for_and_are_all_that_is_left_of_an_archive(pack: Path) -> None:
    pieces = [piece for part in read_manifest(pack) for piece in part.pieces]
    assert {file.name for file in pack.iterdir()} == {"manifest.json", *(piece.name for piece in pieces)}
    assert all((pack / piece.name).stat().st_size == piece.size <= 1000 for piece in pieces)
    assert len(names_of(pack, "vllm")) >= 3
    assert len(names_of(pack, "pagewire")) == 1


def test_pieces_that_come_alone_and_in_any_order_are_unpacked_with_the_last(pack: Path, tmp_path: Path) -> None:
    into, names = tmp_path / "there", names_of(pack, "vllm")
    for number, name in enumerate(reversed(names)):
        arrived = tmp_path / f"call {number}"
        arrived.mkdir()
        for file in ("manifest.json", name):
            (arrived / file).write_bytes((pack / file).read_bytes())
        lacking = join(arrived, into)
        assert lacking == {"vllm": names[: len(names) - 1 - number], "pagewire": ["pagewire.zip.00"]}
        assert (into / "vllm").exists() == (not lacking["vllm"])
    assert (into / "vllm/vllm/__init__.py").read_text() == "ANSWER = 42\n"
    assert join(pack, into) == {"vllm": [], "pagewire": []}
    assert (into / "pagewire/logs.py").exists()
    assert list((into / ".pieces").iterdir()) == []


def test_what_is_unpacked_is_not_asked_for_again_until_there_is_a_newer_pack(pack: Path, tmp_path: Path) -> None:
    into = tmp_path / "there"
    join(pack, into)
    for name in names_of(pack, "pagewire"):
        (pack / name).unlink()
    assert join(pack, into)["pagewire"] == []
    write_archive(pack / "pagewire.zip", [wheel(tmp_path, "logs", **{"logs.py": b"import csv\n"})], {})
    write_manifest(pack, [cut(pack / "pagewire.zip", pack, 1000, {})])
    assert join(pack, into) == {"pagewire": []}
    assert (into / "pagewire/logs.py").read_text() == "import csv\n"


def test_a_damaged_piece_is_refused_by_name_and_asked_for_until_a_whole_one_comes(pack: Path, tmp_path: Path) -> None:
    piece = pack / names_of(pack, "vllm")[1]
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + b"?")
    with pytest.raises(PieceError, match=f"{piece.name} is damaged or of another pack: {len(whole)} bytes"):
        join(pack, tmp_path / "there")
    assert not (tmp_path / "there/vllm").exists()
    piece.write_bytes(whole)
    assert join(pack, tmp_path / "there")["vllm"] == []


def test_an_archive_has_what_wheels_install_on_the_path_and_nothing_that_is_left_out(tmp_path: Path) -> None:
    generated = tmp_path / "a_pb2.py"
    generated.write_text("A = 1\n")
    files = {
        "vllm/a.py": b"1",
        "vllm/large.so": b"2",
        "vllm-1.data/purelib/vllm/b.py": b"3",
        "vllm-1.data/scripts/vllm": b"4",
        "vllm-1.dist-info/METADATA": b"5",
    }
    archives = []
    for name in ("first.zip", "second.zip"):
        made = tmp_path / name
        write_archive(made, [wheel(tmp_path, "vllm", **files)], {"pagewire/v1/a_pb2.py": generated}, ["vllm/large.so"])
        archives.append(made)
    assert set(zipfile.ZipFile(archives[0]).namelist()) == {
        "pagewire/v1/a_pb2.py", "vllm/a.py", "vllm/b.py", "vllm-1.dist-info/METADATA"
    }  # fmt: skip
    assert archives[0].read_bytes() == archives[1].read_bytes()


@pytest.mark.parametrize("content", ["", "[1]", json.dumps([{"name": "vllm"}])])
def test_a_folder_without_a_proper_manifest_is_refused(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(PieceError, match="manifest"):
        join(tmp_path, tmp_path / "there")


@pytest.mark.parametrize("name", ["..", "", "../neighbour", "/neighbour", ".pieces", "a/b", 5])
@pytest.mark.parametrize("of", ["part", "piece"])
def test_a_manifest_whose_names_lead_elsewhere_is_refused_and_nothing_is_removed(
    of: str, name: object, pack: Path, tmp_path: Path
) -> None:
    neighbour = tmp_path / "home/neighbour"
    neighbour.mkdir(parents=True)
    parts = json.loads((pack / "manifest.json").read_text())
    (parts[0] if of == "part" else parts[0]["pieces"][0])["name"] = name
    (pack / "manifest.json").write_text(json.dumps(parts))
    with pytest.raises(PieceError, match="cannot be read as a manifest"):
        join(pack, tmp_path / "home/there")
    assert neighbour.exists()
