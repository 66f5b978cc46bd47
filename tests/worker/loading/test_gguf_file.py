"""A model in parts is the model, whichever part is named; parts that do not belong together are refused."""

import struct
from pathlib import Path

import pytest
from small_gguf import convert_in_this_process, write_gguf

from pagewire_common.start_error import StartError
from worker_service.loading.gguf.file import find_parts, model_name, read_gguf
from worker_service.loading.model_store import find_model

pytest.importorskip("gguf")


def part(number: int, count: int = 3) -> str:
    return f"small-{number:05}-of-{count:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write_gguf(tmp_path / part(1), quantized={"attn_q": "Q8_0", "ffn_up": "Q4_0"}, parts=3)
    return tmp_path


def test_parts_are_joined_whichever_is_named(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_in_this_process(monkeypatch)
    write_gguf(split / "small.gguf", quantized={"attn_q": "Q8_0", "ffn_up": "Q4_0"})
    whole = find_model(str(split / "small.gguf"), split / "cache")
    sources = [find_model(str(split / part(number)), split / "cache") for number in (1, 2, 3)]
    assert {source.model_id for source in sources} == {whole.model_id} == {"small"}
    assert len({source.path for source in sources}) == 1
    for file in whole.path.iterdir():
        assert (sources[0].path / file.name).read_bytes() == file.read_bytes()


def test_a_missing_part_is_named(split: Path) -> None:
    (split / part(2)).unlink()
    with pytest.raises(StartError, match=f"is one of 3 parts of a model, and .*{part(2)} is missing"):
        find_model(str(split / part(3)), split / "cache")


def test_a_name_without_a_number_is_of_one_file() -> None:
    for name in ("a-00001-of-3.gguf", "a-00004-of-00003.gguf", "a-00000-of-00000.gguf"):
        assert find_parts(Path(name)) == [Path(name)]
    assert model_name(Path("a-00001-of-3.gguf")) == "a-00001-of-3"


def test_parts_that_do_not_belong_together_are_refused(split: Path) -> None:
    parts = find_parts(split / part(1))
    assert len(read_gguf(parts).tensors) == 20
    with pytest.raises(StartError, match=r"it is one of 3 parts by its split\.count, and one of 1 by its name"):
        read_gguf([split / part(1)])
    with pytest.raises(StartError, match=r"its split\.no is 2, and its name says 1"):
        read_gguf([parts[0], parts[2], parts[1]])
    wanted, said = (struct.pack("<i", number) for number in (20, 21))
    content = parts[0].read_bytes()
    place = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    assert content[place : place + 4] == wanted
    parts[0].write_bytes(content[:place] + said + content[place + 4 :])
    with pytest.raises(StartError, match=r"split\.tensors\.count is 21, and the parts have 20"):
        read_gguf(parts)


def test_a_tensor_in_two_parts_is_refused(split: Path) -> None:
    first, second, third = find_parts(split / part(1))
    copy = split / "other" / part(1)
    copy.parent.mkdir()
    write_gguf(copy, parts=3, change={"output_norm": (32,)})
    content = first.read_bytes().replace(b"split.no", b"split.nx")
    moved = struct.pack("<H", 1)
    place = content.index(b"split.nx") + len(b"split.nx") + 4
    second.write_bytes((content[:place] + moved + content[place + 2 :]).replace(b"split.nx", b"split.no"))
    with pytest.raises(StartError, match="another part has its tensor"):
        read_gguf([first, second, third])
