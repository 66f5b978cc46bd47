"""Chooses the code for a checkpoint's network: the native decoder for its families, otherwise transformers'."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from worker_service.models.causal_model import CausalModel, Fill
from worker_service.models.config.text_part import BORROWED, TENSORS_OF_IMAGES, padded_tokens, text_part
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import FAMILIES, read_decoder
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.wording import shown

if TYPE_CHECKING:
    # Imports of transformers take two seconds, so they are inside the functions that need them.
    from worker_service.models.borrowed.config import TransformersConfig
    from worker_service.models.encoders.encoder import Encoder
    from worker_service.models.encoders.encoder_config import EncoderConfig
    from worker_service.models.encoders.encoder_decoder import EncoderDecoder
    from worker_service.models.encoders.encoder_decoder_config import EncoderDecoderConfig

AnyConfig: TypeAlias = "DecoderConfig | EncoderConfig | EncoderDecoderConfig | TransformersConfig"

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
"""Families of encoders. Others need more inputs than tokens and positions."""

ENCODER_DECODERS = ("t5", "bart", "whisper")
DECODERS = ("bart", "whisper")
"""Families of encoder-decoders whose decoders also generate alone, in transformers' code."""


def read_config(json: Mapping[str, Any]) -> AnyConfig:
    """Raises ValueError if the network is not supported."""
    family = json.get("model_type")
    if family is not None and not isinstance(family, str):
        raise ValueError(f"model_type is {shown(family)}; it must be the name of a family")
    whole, text = json, text_part(json)
    if text is not whole and text["model_type"] not in (*FAMILIES, *BORROWED):
        raise ValueError(f"a model {family} whose text network is {shown(text['model_type'])} is not supported")
    json, family = text, text.get("model_type")
    if family in FAMILIES:
        config = read_decoder(text)
        if text is whole:
            return config
        padded, padding = padded_tokens(whole)
        ignored = (*config.ignored_tensors, *TENSORS_OF_IMAGES)
        return replace(config, ignored_tensors=ignored, padded_tokens=padded, padding_token=padding)
    if family in ENCODERS and json.get("is_decoder") is not True:
        from worker_service.models.encoders.encoder_config import EncoderConfig

        return EncoderConfig.from_json(json)
    if family in ENCODER_DECODERS and not (json.get("is_encoder_decoder") is False and family in DECODERS):
        from worker_service.models.encoders.encoder_decoder_config import EncoderDecoderConfig

        return EncoderDecoderConfig.from_json(json)
    from worker_service.models.borrowed.config import TransformersConfig

    borrowed = TransformersConfig.from_json(json)
    return borrowed if text is whole else borrowed.ignoring(TENSORS_OF_IMAGES)


def build_model(
    config: AnyConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    batch_invariant: bool = False,
    fill: Fill | None = None,
) -> CausalModel:
    """A network for generation without an encoder, with weights unfilled. ranks, batch_invariant (see `ops_for`) and
    fill (see `Decoder`) concern native networks only."""
    if isinstance(config, DecoderConfig):
        return Decoder(config, dtype, device, ranks, batch_invariant=batch_invariant, fill=fill)
    from worker_service.models.borrowed.model import TransformersModel

    return TransformersModel(config, dtype, device)  # type: ignore[arg-type]


def build_encoder(config: AnyConfig, dtype: torch.dtype, device: torch.device) -> "Encoder":
    """An encoder with weights unfilled."""
    from worker_service.models.encoders.encoder import Encoder

    return Encoder(config, dtype, device)  # type: ignore[arg-type]


def build_encoder_decoder(config: AnyConfig, dtype: torch.dtype, device: torch.device) -> "EncoderDecoder":
    """An encoder-decoder with weights unfilled."""
    from worker_service.models.encoders.encoder_decoder import EncoderDecoder

    return EncoderDecoder(config, dtype, device)  # type: ignore[arg-type]
