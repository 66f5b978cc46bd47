"""A header is believed where it agrees with its file; whatever else the bytes are, the answer is one sentence."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from untrusted_bytes import read_untrusted

from pagewire_common.start_error import StartError
from worker_service.loading.files.safetensors_header import MAX_HEADER_BYTES, read_header


def pack(header: object, data: bytes = bytes(24)) -> bytes:
    """A file of this header and data."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SOUND = {
    "__metadata__": {"format": "pt"},
    "a.weight": entry(shape=[2, 2], offsets=[0, 16]),
    "empty": entry("I64", [0, 3], [16, 16]),
    "scalar": entry("F64", [], [16, 24]),
}


def test_a_sound_header_says_where_everything_lies(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack(SOUND))
    header = read_header(file)
    begin = len(pack(SOUND)) - 24
    assert {name: (t.dtype, t.shape, t.begin - begin, t.end - begin) for name, t in header.tensors.items()} == {
        "a.weight": ("F32", (2, 2), 0, 16),
        "empty": ("I64", (0, 3), 16, 16),
        "scalar": ("F64", (), 16, 24),
    }
    assert json.loads(header.content) == SOUND


UNSOUND = {
    "nothing": (b"", "it has 0 bytes"),
    "less than a length": (b"1234567", "it has 7 bytes"),
    "a header beyond the file": (struct.pack("<Q", 3) + b"{}", "claims 3 bytes, where the file has 2"),
    "bytes": (pack(b"\xff\xfe"), "is not JSON in UTF-8"),
    "UTF-16": (pack(json.dumps(SOUND).encode("utf-16")), "is not JSON in UTF-8"),
    "half of JSON": (pack(b'{"a":'), "is not JSON in UTF-8"),
    "endless depth": (pack(b"[" * 100_000), "is not JSON in UTF-8"),
    "a number of endless digits": (pack(b"[" + b"9" * 5000 + b"]"), "is not JSON in UTF-8"),
    "a list": (pack([]), "is not a JSON object"),
    "a name twice": (pack(b'{"a": 1, "a": 2}'), "its header has a twice"),
    "metadata that is none": (pack({"__metadata__": {"a": 1}}, b""), "__metadata__ does not map"),
    "a number for a tensor": (pack({"a": 3}), "describes tensor a by 3"),
    "an empty description": (pack({"a": {}}), "tensor a is of the unknown type None"),
    "an unknown type": (pack({"a": entry("F31")}), "tensor a is of the unknown type 'F31'"),
    "a list as type": (pack({"a": entry(["F32"])}), "tensor a is of the unknown type"),
    "a negative size": (pack({"a": entry(shape=[-2])}), r"tensor a has the shape \[-2\]"),
    "a fraction as size": (pack({"a": entry(shape=[2.0])}), r"tensor a has the shape \[2.0\]"),
    "truth as size": (pack({"a": entry(shape=[True])}), r"tensor a has the shape \[True\]"),
    "text as shape": (pack({"a": entry(shape="2")}), "tensor a has the shape '2'"),
    "one offset": (pack({"a": entry(offsets=[0])}), r"tensor a has the data_offsets \[0\]"),
    "offsets backwards": (pack({"a": entry(offsets=[8, 0])}), r"tensor a has the data_offsets \[8, 0\]"),
    "an offset beyond the file": (
        pack({"a": entry(shape=[2**62], offsets=[0, 2**64])}),
        r"tensor a ends at byte \d+, and the file has \d+",
    ),
    "a product that wraps around 64 bits": (
        pack({"a": entry(shape=[2**32, 2**32, 2], offsets=[0, 8])}),
        r"tensor a has 8 bytes, not those of F32 \[4294967296, 4294967296, 2\]",
    ),
    "a product of endless digits": (
        pack({"a": entry(shape=[10**4000] * 2000)}),
        "tensor a has 8 bytes, not those of F32",
    ),
    "half a byte": (pack({"a": entry("F4", [1], [0, 1])}, b"1"), "tensor a has 1 bytes, not those of F4"),
    "an overlap": (pack({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "tensor b overlaps tensor a"),
    "a gap": (
        pack({"a": entry(offsets=[8, 16])}, bytes(16)),
        "8 bytes between its header and tensor a belong to no tensor",
    ),
    "more than tensors": (pack({"a": entry()}, bytes(9)), "1 bytes behind tensor a belong to no tensor"),
    "a name of two lines": (pack({"a\nb": 3}), r"describes tensor 'a\\nb' by 3"),
    "a name of endless length": (pack({"a" * 10_000: 3}), r"describes tensor 'a+\.\.\.a+' by 3"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_file_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    content, sentence = UNSOUND[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(StartError, match=f"model.safetensors is not a sound safetensors file: .*{sentence}") as refusal:
        read_header(file)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 600


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        stream.truncate(2 * MAX_HEADER_BYTES)  # takes no space on disk
    with pytest.raises(StartError, match=f"the format allows {MAX_HEADER_BYTES}"):
        read_header(file)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot read .*gone\.safetensors: No such file"):
        read_header(tmp_path / "gone.safetensors")


def check_any_bytes(content: bytes) -> None:
    """A sentence, or a header whose tensors are the file and nothing but the file."""
    if header := read_untrusted(read_header, content):
        reached = 8 + len(header.content)
        for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
            assert tensor.begin == reached
            reached = tensor.end
        assert reached == len(content)


NUMBERS = st.integers(-1, 4) | st.integers() | st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**300])
VALUES = st.recursive(NUMBERS | st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=6)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "F6_E2M3"]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=4) | VALUES,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | VALUES,
    }
)


@given(st.binary(max_size=200))
@example(struct.pack("<Q", 2) + b"{}")
def test_any_bytes_whatever_get_an_answer(content: bytes) -> None:
    check_any_bytes(content)


@given(st.dictionaries(st.text(max_size=5), ENTRIES | VALUES, max_size=4), st.binary(max_size=40))
@example(SOUND, bytes(24))
def test_any_header_whatever_gets_an_answer(header: dict[str, Any], data: bytes) -> None:
    check_any_bytes(pack(header, data))


@given(st.data())
def test_a_sound_file_with_a_few_bytes_changed_gets_an_answer(data: st.DataObject) -> None:
    content = bytearray(pack(SOUND))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789-.e"[]{},: '))
    check_any_bytes(bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]))
