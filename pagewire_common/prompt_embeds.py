"""Reads the header of prompt_embeds: a safetensors file with one tensor of embeddings.

The file: 8 bytes for the length of the JSON header, the header, then the tensor. A pickle, as torch.save writes, could
run code, and is never read.
"""

from typing import NamedTuple

from pagewire_common.model_files.json_text import loads

MAX_BYTES = 16 << 20
"""Bytes of all prompt_embeds of a request. A step of a worker contains at most one request more than its budget."""
MAX_HEADER_BYTES = 4096
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = (b"PK\x03\x04", b"\x80")
"""The first bytes of a zip archive with a pickle, and of a pickle."""


class EmbeddingsHeader(NamedTuple):
    """`begin`: offset of the tensor's first byte."""

    dtype: str
    num_embeddings: int
    size: int
    begin: int


def read_embeddings_header(data: bytes) -> EmbeddingsHeader:
    """Raises ValueError with the rest of a sentence that begins with the file's name."""
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES and data.startswith(_PICKLES):
        raise ValueError("is a pickle, as torch.save writes, which could run code; send it as safetensors")
    begin = 8 + length
    if len(data) < 8 or begin > len(data):
        raise ValueError(f"has {len(data)} bytes and is no safetensors file")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = loads(data[8:begin])
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError, AttributeError):
        raise ValueError("is no safetensors file: its header is not JSON") from None
    if len(tensors) != 1:
        raise ValueError(f"has {len(tensors)} tensors; it must have one")
    (tensor,) = tensors.values()
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("is no safetensors file: its tensor has no dtype, shape and data_offsets")
    dtype, shape = tensor["dtype"], tensor["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"has a tensor of type {str(dtype)[:16]}; it must be one of {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(size) is not int or size < 1 for size in shape):
        raise ValueError(f"has a tensor of shape {str(shape)[:64]}; it must be [number of tokens, size]")
    num_bytes = len(data) - begin
    if tensor["data_offsets"] != [0, num_bytes] or shape[0] * shape[1] * DTYPE_BYTES[dtype] != num_bytes:
        raise ValueError(f"has {num_bytes} bytes after its header; its tensor has another size")
    return EmbeddingsHeader(dtype, shape[0], shape[1], begin)
