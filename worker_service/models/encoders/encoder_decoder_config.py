"""Reads the config.json of an encoder-decoder: a whole text or sound in, generated text out."""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from worker_service.models.borrowed.weights import tied_tensors
from worker_service.models.config.config_keys import architectures
from worker_service.models.config.config_limits import check_padding
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known
from worker_service.read_keys import ReadKeys
from worker_service.wording import named, shown

_NEUTRAL: Mapping[str, object] = {
    "add_bias_logits": False, "add_final_layer_norm": False, "extra_pos_embeddings": 2, "normalize_before": False,
    "normalize_embedding": True, "static_position_embeddings": False,
}  # fmt: skip
"""Keys of older BART files, with the only value that transformers implements."""
_LARGEST = 1 << 20
"""Maximum of each size; existing networks are smaller."""
_FARTHEST = 1 << 16
_SOUND_TOKENS = 1500
_FRAMES_PER_TOKEN = 2
"""Audio frames that Whisper's second convolution combines into a token."""


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Families: `registry.ENCODER_DECODERS`. Fields without `encoder` in their name describe the decoder.
    Cross-attention has the heads of self-attention."""

    network: Any
    """transformers' configuration object."""
    network_class: Any
    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    max_encoder_len: int
    """Encoder tokens of an input: the maximum for texts, the exact number for sounds."""
    num_mel_bins: int = 0
    """Mel bins of a frame; 0 for texts."""
    median_filter_width: int = 1
    """Encoder tokens. The filter smooths the cross-attention weights for times of words."""
    own_tensors: frozenset[str] = frozenset()
    """Tied tensors with separate values in the checkpoint. T5's head is always tied unless listed; its
    tie_word_embeddings decides only whether hidden states are scaled."""

    kv_parts = 2
    sliding_window = None
    windows = ()

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "EncoderDecoderConfig":
        """Raises ValueError if the network is not supported."""
        keys = ReadKeys(json)
        keys.neutral(**_NEUTRAL)
        keys.without_effect("n_positions")  # `_t5` reads T5's
        network = parse(json)
        if not network.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder is false; a model {network.model_type} is supported as an encoder-decoder only"
            )
        sizes = _SIZES[network.model_type](network)
        check_padding(network)
        mapping = AutoModelForSpeechSeq2Seq if "num_mel_bins" in sizes else AutoModelForSeq2SeqLM
        network_class = mapping._model_mapping[type(network)]
        without_head = AutoModel._model_mapping[type(network)].__name__
        for name in architectures(json):
            if name not in (network_class.__name__, without_head, "T5WithLMHeadModel"):
                raise ValueError(f"architectures names {named(name)}; supported is {network_class.__name__}")
        check_known(keys.unread(), network, network_class)
        return cls(
            network=network,
            network_class=network_class,
            vocabulary_size=network.vocab_size,
            hidden_size=network.d_model,
            **sizes,
        )

    @cached_property
    def _blueprint(self) -> Any:
        with torch.device("meta"):
            return self.network_class._from_config(copy.deepcopy(self.network))

    @property
    def tied(self) -> Mapping[str, str]:
        every = tied_tensors(self._blueprint)
        return {name: other for name, (_, other) in every.items() if name not in self.own_tensors}

    def untied(self, own: frozenset[str]) -> "EncoderDecoderConfig":
        return replace(self, own_tensors=own)

    @property
    def ignored_tensors(self) -> Collection[str]:
        return tuple(self._blueprint._keys_to_ignore_on_load_unexpected or ())

    @property
    def num_frames(self) -> int:
        """Audio frames of a sound."""
        return self.max_encoder_len * _FRAMES_PER_TOKEN

    @property
    def feature_bytes(self) -> int:
        """Bytes of a sound's mel features; 0 for texts."""
        return self.num_mel_bins * self.num_frames * 4


def _size(network: Any, name: str, default: int | None = None) -> int:
    value = getattr(network, name, default)
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number from 1 to {_LARGEST}")
    return value


def _t5(network: Any) -> dict[str, Any]:
    buckets, farthest = network.relative_attention_num_buckets, network.relative_attention_max_distance
    if not (type(buckets) is type(farthest) is int and 4 <= buckets <= farthest <= _FARTHEST):
        raise ValueError(
            f"relative_attention_num_buckets is {shown(buckets)} and relative_attention_max_distance {shown(farthest)}"
            f"; the first must be a whole number from 4 on, and the second one from there to {_FARTHEST}"
        )
    # T5 has no maximum, so its length in training is the limit.
    longest = _size(network, "n_positions", 512)
    return {
        "num_layers": _size(network, "num_decoder_layers"),
        "num_kv_heads": _size(network, "num_heads"),
        "head_dim": _size(network, "d_kv"),
        "max_model_len": longest,
        "max_encoder_len": longest,
    }


def _bart(network: Any) -> dict[str, Any]:
    longest = _size(network, "max_position_embeddings")
    return {**_decoder(network), "max_model_len": longest, "max_encoder_len": longest}


def _whisper(network: Any) -> dict[str, Any]:
    if network.max_source_positions != _SOUND_TOKENS:
        raise ValueError(
            f"max_source_positions is {shown(network.max_source_positions)}; it must be the tokens of 30 s of sound, "
            f"{_SOUND_TOKENS}"
        )
    if (width := _size(network, "median_filter_width")) % 2 == 0:
        raise ValueError(f"median_filter_width is {width}; it must be odd")
    return {
        **_decoder(network),
        "median_filter_width": width,
        "max_model_len": _size(network, "max_target_positions"),
        "max_encoder_len": _SOUND_TOKENS,
        "num_mel_bins": _size(network, "num_mel_bins"),
    }


def _decoder(network: Any) -> dict[str, Any]:
    """Sizes of the decoder of BART or Whisper."""
    width = _size(network, "d_model")
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        if width % _size(network, name):
            raise ValueError(f"d_model is {width}, and {name} {getattr(network, name)}, which must divide it")
    heads = network.decoder_attention_heads
    return {
        "num_layers": _size(network, "decoder_layers"),
        "num_kv_heads": heads,
        "head_dim": width // heads,
    }


_SIZES: dict[str, Callable[[Any], dict[str, Any]]] = {"t5": _t5, "bart": _bart, "whisper": _whisper}
