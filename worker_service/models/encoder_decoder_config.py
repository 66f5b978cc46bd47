"""The config.json of a network of two parts: an encoder that reads a text or a sound whole, and a decoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from worker_service.models.transformers_json import parse
from worker_service.wording import shown

_LARGEST = 1 << 20
"""Of any size: larger than that of any existing network."""
_FARTHEST = 1 << 16
_SOUND_TOKENS = 1500
_FRAMES_PER_TOKEN = 2
"""Of a sound: Whisper's second convolution makes one token of two frames."""


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """A network of one of `registry.ENCODER_DECODERS`, and the class that computes it.

    Layers, heads and lengths without another word are the decoder's; its cross attention has heads of the same number
    and size as its self-attention.
    """

    network: Any
    """The configuration as transformers has it."""
    network_class: Any
    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    max_encoder_len: int
    """Tokens that the encoder reads of a text at most, and of a sound always."""
    ties_embeddings: bool = True
    """Whether the product that makes logits has the tokens' embeddings for weights. transformers looks for that in the
    checkpoint, whatever T5's configuration says."""
    num_mel_bins: int = 0
    """Numbers of a sound's frame; 0 for text."""

    sliding_window = None

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "EncoderDecoderConfig":
        """Raises ValueError where it describes no network that can be run."""
        network = parse(json)
        sizes = _SIZES[network.model_type](network)
        for name, value in sizes.items():
            if type(value) is not int or not 1 <= value <= _LARGEST:
                raise ValueError(f"{name} is {shown(value)}; it must be a whole number from 1 to {_LARGEST}")
        mapping = AutoModelForSpeechSeq2Seq if "num_mel_bins" in sizes else AutoModelForSeq2SeqLM
        return cls(
            network=network,
            network_class=mapping._model_mapping[type(network)],
            vocabulary_size=network.vocab_size,
            hidden_size=network.d_model,
            ties_embeddings=json.get("tie_word_embeddings") is not False,
            **sizes,
        )

    @property
    def num_frames(self) -> int:
        """Of a sound."""
        return self.max_encoder_len * _FRAMES_PER_TOKEN

    @property
    def feature_bytes(self) -> int:
        """Of a sound's features; 0 for text."""
        return self.num_mel_bins * self.num_frames * 4


def _t5(network: Any) -> dict[str, Any]:
    buckets, farthest = network.relative_attention_num_buckets, network.relative_attention_max_distance
    if not (type(buckets) is type(farthest) is int and 4 <= buckets <= farthest <= _FARTHEST):
        raise ValueError(
            f"relative_attention_num_buckets is {shown(buckets)} and relative_attention_max_distance {shown(farthest)}"
            f"; the first must be a whole number from 4 on, and the second one from there to {_FARTHEST}"
        )
    # Nothing in the network bounds its lengths; this is what it was trained with.
    longest = getattr(network, "n_positions", 512)
    return {
        "num_layers": network.num_decoder_layers,
        "num_kv_heads": network.num_heads,
        "head_dim": network.d_kv,
        "max_model_len": longest,
        "max_encoder_len": longest,
    }


def _bart(network: Any) -> dict[str, Any]:
    return {
        "num_layers": network.decoder_layers,
        "num_kv_heads": network.decoder_attention_heads,
        "head_dim": network.d_model // max(1, network.decoder_attention_heads),
        "max_model_len": network.max_position_embeddings,
        "max_encoder_len": network.max_position_embeddings,
    }


def _whisper(network: Any) -> dict[str, Any]:
    if network.max_source_positions != _SOUND_TOKENS:
        raise ValueError(
            f"max_source_positions is {shown(network.max_source_positions)}; sounds are heard 30 s at a time, which is "
            f"{_SOUND_TOKENS}"
        )
    return {
        "num_layers": network.decoder_layers,
        "num_kv_heads": network.decoder_attention_heads,
        "head_dim": network.d_model // max(1, network.decoder_attention_heads),
        "max_model_len": network.max_target_positions,
        "max_encoder_len": network.max_source_positions,
        "num_mel_bins": network.num_mel_bins,
    }


_SIZES: dict[str, Callable[[Any], dict[str, Any]]] = {"t5": _t5, "bart": _bart, "whisper": _whisper}
