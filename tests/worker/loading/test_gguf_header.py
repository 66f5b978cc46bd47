"""A GGUF header is believed where it agrees with its file; whatever else the bytes are, the answer is one sentence."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_gguf import write_gguf
from untrusted_bytes import read_untrusted

from pagewire_common.start_error import StartError
from worker_service.loading.gguf import header as gguf_header
from worker_service.loading.gguf.file import find_parts, read_gguf
from worker_service.loading.gguf.header import GgufTensor, read_gguf_header

F32, Q4_0 = 0, 2
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def text(value: bytes) -> bytes:
    return number(len(value)) + value


def pair(key: bytes, value_type: int, value: bytes) -> bytes:
    return text(key) + number(value_type, 4) + value


def array(value_type: int, count: int, values: bytes = b"") -> bytes:
    return number(value_type, 4) + number(count) + values


def tensor(name: bytes, shape: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + number(len(shape), 4) + b"".join(map(number, shape)) + number(kind, 4) + number(offset)


def pack(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these parts; the counts are theirs unless given."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    header = b"GGUF" + number(version, 4) + b"".join(map(number, counts)) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


OF_A = pair(b"general.architecture", STRING, text(b"a"))
SOUND = pack(
    [
        pair(b"general.architecture", STRING, text(b"llama")),
        pair(b"general.alignment", UINT32, number(64, 4)),
        pair(b"a.float", FLOAT32, struct.pack("<f", float("nan"))),
        pair(b"a.words", ARRAY, array(STRING, 2, text(b"a") + text(b""))),
        pair(b"a.grid", ARRAY, array(ARRAY, 2, array(UINT32, 1, number(7, 4)) + array(UINT32, 0))),
    ],
    [tensor(b"a", [2, 3]), tensor(b"packed", [32, 2], Q4_0, offset=64), tensor(b"scalar", [], offset=128)],
    bytes(132),
    alignment=64,
)


def test_a_sound_header_says_where_everything_lies(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(SOUND)
    begin = len(SOUND) - 132
    header = read_gguf_header(file)
    assert header.tensors == {
        "a": GgufTensor(file, "F32", (2, 3), begin, begin + 24),
        "packed": GgufTensor(file, "Q4_0", (32, 2), begin + 64, begin + 64 + 36),
        "scalar": GgufTensor(file, "F32", (), begin + 128, begin + 132),
    }
    assert [tensor.row_bytes for tensor in header.tensors.values()] == [8, 18, 4]
    found = dict(header.metadata)
    assert str(found.pop("a.float")) == "nan"
    assert found == {
        "general.architecture": "llama", "general.alignment": 64, "a.words": ["a", ""], "a.grid": None
    }  # fmt: skip


def test_what_the_library_writes_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "small.gguf"
    write_gguf(file)
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    assert header.tensors == {
        tensor.name: GgufTensor(
            file,
            tensor.tensor_type.name,
            tuple(tensor.shape.tolist()),
            tensor.data_offset,
            tensor.data_offset + tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    for key, value in header.metadata.items():
        expected = reader.fields[key].contents()
        assert type(expected)(value) == expected, key


DEEP = array(UINT32, 0)
for _ in range(5):
    DEEP = array(ARRAY, 1, DEEP)

UNSOUND = {
    "nothing": (b"", "the file ends inside the magic number"),
    "another kind of file": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "an old version": (pack(version=1), "its version is 1; supported are 2 and 3"),
    "the other byte order": (pack(version=3 << 24), "supported are 2 and 3, little endian"),
    "tensors without end": (pack(num_tensors=2**64 - 1), "the list of tensors claims 18446744073709551615 entries"),
    "keys without end": (pack(num_pairs=2**60), "the list of keys claims 1152921504606846976 entries"),
    "a key without end": (pack([number(2**63) + bytes(99)]), "the name of key 0 claims 9223372036854775808 bytes"),
    "a key that is no text": (pack([pair(b"\xff", UINT32, bytes(4))]), "the name of key 0 is not UTF-8"),
    "a key twice": (pack([pair(b"a", UINT32, bytes(4))] * 2), "it has the key a twice"),
    "an unknown type of value": (pack([pair(b"a", 13, bytes(9))]), "the value of a is of the unknown type 13"),
    "a text without end": (pack([pair(b"a", STRING, number(2**40))]), "the file ends inside the value of a"),
    "an array without end": (
        pack([pair(b"a", ARRAY, array(UINT32, 2**62))]),
        "the value of a claims 4611686018427387904 entries, for which",
    ),
    "a text that is none": (pack([pair(b"a", STRING, text(b"\xff"))]), "the value of a is not UTF-8"),
    "texts without end": (pack([pair(b"a", ARRAY, array(STRING, 2**60))]), "the value of a claims 11529"),
    "an array of an unknown type": (
        pack([pair(b"a", ARRAY, array(99, 0))]),
        "the value of a is of the unknown type 99",
    ),
    "arrays in arrays in arrays": (pack([pair(b"a", ARRAY, DEEP)]), "the value of a nests arrays more than 4 deep"),
    "no alignment": (pack([pair(b"general.alignment", UINT32, number(0, 4))]), "general.alignment is 0"),
    "an odd alignment": (pack([pair(b"general.alignment", UINT32, number(33, 4))]), "general.alignment is 33"),
    "an alignment in words": (pack([pair(b"general.alignment", STRING, text(b"x"))]), "general.alignment is 'x'"),
    "a part of a model": (
        pack([pair(b"split.count", UINT32, number(3, 4))]),
        "it is one of 3 parts by its split.count",
    ),
    "five dimensions": (
        pack([], [tensor(b"t", [1] * 5)], bytes(4)),
        "tensor t has 5 dimensions; at most 4 are supported",
    ),
    "dimensions without end": (
        pack([], [text(b"t") + number(2**32 - 1, 4) + bytes(20)]),
        "tensor t has 4294967295 dimensions",
    ),
    "an unknown quantisation": (pack([], [tensor(b"t", [1], 999)], bytes(4)), "tensor t is of the unknown type 999"),
    "half a block": (
        pack([], [tensor(b"t", [33], Q4_0)], bytes(99)),
        "rows of 33, which Q4_0 packs by 32",
    ),
    "an odd offset": (
        pack([], [tensor(b"t", [1], offset=4)], bytes(99)),
        "t is at 4, which is no multiple of 32",
    ),
    "a tensor twice": (pack([], [tensor(b"t", [1])] * 2, bytes(99)), "it has the tensor t twice"),
    "two tensors in one place": (
        pack([], [tensor(b"t", [9]), tensor(b"u", [1], offset=32)], bytes(99)),
        "tensor u overlaps tensor t",
    ),
    "less data than tensors": (
        pack([], [tensor(b"t", [9])], bytes(35)),
        r"tensor t, F32 \[9\], ends at byte \d+, and the file has \d+; it may be incomplete",
    ),
    "a product that wraps around 64 bits": (pack([], [tensor(b"t", [2**32, 2**31, 2])], bytes(99)), "tensor t, F32"),
    "an offset that wraps around 64 bits": (pack([], [tensor(b"t", [8], offset=2**64 - 32)], bytes(99)), "tensor t, F"),
    "more layers than there are": (
        pack([OF_A, pair(b"a.block_count", UINT32, number(2**32 - 1, 4))], [tensor(b"blk.0.t", [1])], bytes(99)),
        "a.block_count is 4294967295, and there are tensors of 1 blocks",
    ),
    "fewer layers than there are": (
        pack(
            [OF_A, pair(b"a.block_count", UINT32, number(1, 4))],
            [tensor(b"blk.0.t", [1]), tensor(b"blk.1.t", [1], offset=32)],
            bytes(99),
        ),
        "a.block_count is 1, and there are tensors of 2 blocks",
    ),
    "more experts than there are": (
        pack([OF_A, pair(b"a.expert_count", UINT32, number(9, 4))], [tensor(b"t", [2, 3])], bytes(99)),
        "a.expert_count is 9, and no tensor has so many parts",
    ),
    "no heads": (pack([OF_A, pair(b"a.attention.head_count", UINT32, number(0, 4))]), "a.attention.head_count is 0"),
    "nothing beyond the end": (pack([], [tensor(b"t", [0], offset=2**63)]), "tensor t, F32"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_file_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    content, sentence = UNSOUND[name]
    file = tmp_path / "small.gguf"
    file.write_bytes(content)
    with pytest.raises(StartError, match=f"small.gguf is not a sound GGUF file: .*({sentence})") as refusal:
        read_gguf(find_parts(file))
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("length", range(0, len(SOUND), 5))
def test_a_file_cut_off_anywhere_is_refused_with_a_sentence(length: int, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(SOUND[:length])
    with pytest.raises(StartError, match=r"small\.gguf is not a sound GGUF file"):
        read_gguf_header(file)


def check_any_bytes(content: bytes) -> None:
    """A sentence, or tensors that lie within the file and beside each other."""
    header = read_untrusted(read_gguf_header, content)
    tensors = header.tensors if header else {}
    reached = 24
    for found in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        assert found.begin >= reached
        reached = found.end
    assert reached <= max(24, len(content))


def test_values_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the file is in which they would have room."""
    file = tmp_path / "small.gguf"
    limits = {"_MAX_VALUE_BYTES": 8, "_MAX_TEXTS": 2, "_MAX_METADATA_BYTES": 100}
    for name, limit in limits.items():
        monkeypatch.setattr(gguf_header, name, limit)
    for value, sentence in {
        pair(b"a", STRING, text(bytes(9))): "the value of a is a text of 9 bytes; at most 8 are read",
        pair(b"a", ARRAY, array(UINT32, 3, bytes(12))): "the value of a has 12 bytes; at most 8 are read",
        pair(b"a", ARRAY, array(STRING, 3, text(b"") * 3)): "the value of a has 3 texts; at most 2 are read",
        pair(b"a" * 80, STRING, text(b"")): "its keys and values have more than 100 bytes",
    }.items():
        file.write_bytes(pack([value]))
        with pytest.raises(StartError, match=sentence):
            read_gguf_header(file)


COUNTS = st.integers(0, 4) | st.integers(0, 2**64 - 1) | st.sampled_from([2**32, 2**61, 2**63])
SHORT = st.binary(max_size=4)
ANY_VALUE = st.tuples(
    st.integers(0, 13), st.one_of(st.binary(max_size=16), st.builds(array, st.integers(0, 13), COUNTS))
)
ANY_PAIR = st.builds(lambda key, value: pair(key, *value), SHORT | st.just(b"general.alignment"), ANY_VALUE)
ANY_TENSOR = st.builds(tensor, SHORT, st.lists(COUNTS, max_size=5), st.integers(0, 41), COUNTS | st.just(32))


@given(st.binary(max_size=200))
def test_any_bytes_whatever_get_an_answer(content: bytes) -> None:
    check_any_bytes(b"GGUF\3\0\0\0" + content)
    check_any_bytes(content)


@given(
    st.lists(ANY_PAIR, max_size=4),
    st.lists(ANY_TENSOR, max_size=4),
    st.binary(max_size=80),
    st.none() | COUNTS,
    st.none() | COUNTS,
)
@example([], [tensor(b"t", [8])], bytes(32), None, None)
def test_any_header_whatever_gets_an_answer(
    pairs: list[bytes], tensors: list[bytes], data: bytes, num_pairs: int | None, num_tensors: int | None
) -> None:
    check_any_bytes(pack(pairs, tensors, data, num_pairs=num_pairs, num_tensors=num_tensors))


@given(st.data())
def test_a_sound_file_with_a_few_bytes_changed_gets_an_answer(data: st.DataObject) -> None:
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    check_any_bytes(bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]))
