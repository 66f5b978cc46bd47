"""Refuses checkpoints with tensors that the network does not use, except harmless ones."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import structlog
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.files.safetensors_header import StoredTensor
from worker_service.wording import named

log = structlog.get_logger()
_MAX_NAMED = 5
_MAX_BIASES = 1 << 20
"""Elements of a bias. No linear layer has more outputs."""


class _Harmless(NamedTuple):
    name: str
    """A regular expression for the last parts of a tensor's name."""
    dims: Collection[int]
    reason: str


_DRAFTING = r"mtp(_layers)?\..+"
_HARMLESS = (
    _Harmless(r"(rotary_emb|rotary_pos_emb|rope)\.(original_)?inv_freq", (1,), "config.json says the frequencies"),
    _Harmless(r"(embeddings|position_embedding|embed_positions)\.position_ids", (1, 2), "0, 1, 2, and so on"),
    _Harmless(r"(attn|attention)\.bias", (4,), "a causal mask"),
    _Harmless(r"(attn|attention)\.masked_bias", (0, 1), "the number that masks, minus infinity"),
    _Harmless(_DRAFTING, range(8), "drafting layers, which --speculative-config may read"),
    _Harmless(
        r"(\w*attn|\w*attention|[kqv]_proj)\.([kqv]|kv|prob|output)_(scale|zero_point)", (0, 1),
        "scales for a cache in 8 bits; a cache in --kv-cache-dtype has scales of its own",
    ),
)  # fmt: skip


def check_none_left(
    tensors: Mapping[str, StoredTensor], taken: Collection[str], ignored: Collection[str], read: Callable[[str], Tensor]
) -> None:
    """Raise StartError if an unused tensor might change the network's output. taken: names of used tensors; ignored:
    patterns of names that this network does not use, such as layers for multi-token prediction, which are logged.
    Biases of zeros are accepted, because GPTQ's files have a bias for every layer."""
    unneeded = re.compile("|".join([rf"(^|\.){_DRAFTING}$", *ignored]))
    if unused := [name for name in sorted(tensors) if name not in taken and unneeded.search(name)]:
        log.info("the network does not use all tensors of the checkpoint", number=len(unused), first=unused[0])
    left = [
        name
        for name, tensor in sorted(tensors.items())
        if name not in taken
        and not any(re.search(rf"(^|\.){one.name}$", name) and len(tensor.shape) in one.dims for one in _HARMLESS)
        and not any(re.search(pattern, name) for pattern in ignored)
        and not _is_zero_bias(name, tensor, read)
    ]
    if left:
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        raise StartError(
            f"{tensors[left[0]].file.parent}: the weights have tensors that the network of config.json does not use"
            f": {', '.join(map(named, left[:_MAX_NAMED]))}{more}; config.json may be of another network"
        )


def _is_zero_bias(name: str, tensor: StoredTensor, read: Callable[[str], Tensor]) -> bool:
    is_bias = name.endswith(".bias") and len(tensor.shape) == 1 and tensor.shape[0] <= _MAX_BIASES
    return is_bias and tensor.dtype in ("F64", "F32", "F16", "BF16") and not read(name).any()
