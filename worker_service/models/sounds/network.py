"""Encodes sounds in transformers' code: features, the audio network, and the projection to the decoder's size."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.masking_utils import create_bidirectional_mask

from pagewire_common.sounds.families import SAMPLE_BYTES, SAMPLE_RATE
from pagewire_common.start_error import StartError
from worker_service.models.borrowed.network import build_network, pack_linears
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.config.text_part import text_part
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels


@dataclass(frozen=True)
class SoundConfig:
    network: Any
    """transformers' configuration object, with a text network without layers."""
    network_class: Any
    num_deep: int = 0
    own_tensors: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "SoundConfig":
        """json: a config.json with sounds. Raises ValueError if the network is not supported."""
        network = parse({**json, "text_config": {**text_part(json)}})
        audio = network.audio_config
        unread = {name: value for name, value in (json.get("audio_config") or {}).items() if name != "init_std"}
        check_known(unread, audio, AutoModel._model_mapping[type(audio)])
        network = copy.deepcopy(network)
        text = network.text_config
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        return cls(network, AutoModel._model_mapping[type(network)])


class SoundReader:
    """Runs transformers' feature extractor."""

    def __init__(self, folder: Path) -> None:
        """folder: the model's. Raises StartError."""
        from transformers import AutoFeatureExtractor

        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers may raise any error
            raise StartError(f"the feature extractor in {folder} cannot be read: {error}") from error

    def read(self, data: bytes, width: int, height: int) -> Sequence[Pixels]:
        """data: `width` samples, float32. Raises ValueError for another number, and the errors of transformers."""
        if len(data) != width * SAMPLE_BYTES or height != 1:
            raise ValueError(f"the sound has {len(data)} bytes, and the request says {width} samples")
        found = self._extractor(
            np.frombuffer(data, dtype="<f4"), sampling_rate=SAMPLE_RATE, padding="max_length",
            return_attention_mask=True, return_tensors="pt",
        )  # fmt: skip
        return [{"input_features": found["input_features"], "num_frames": found["attention_mask"].sum(-1)}]


class SoundTower:
    def __init__(self, config: SoundConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights unfilled."""
        self._dtype, self._device = dtype, device
        self._network = build_network(config, dtype, device, "sdpa")
        del self._network.language_model

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See `Loadable.checkpoint_tensors`."""
        return {f"model.{name}": place for name, place in checkpoint_places(self._network).items()}

    def pack(self) -> None:
        """Called once, after all tensors have been filled."""
        pack_linears([module for module in self._network.modules() if type(module) is nn.Linear])

    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        """Encode one sound, whose features are filled up to the length of a window."""
        tower, features = self._network.audio_tower, pixels["input_features"].to(self._device, self._dtype)
        kept, num_tokens = tower._get_feat_extract_output_lengths(pixels["num_frames"])
        length = (features.shape[-1] - 2) // 2 + 1
        is_sound = (torch.arange(length)[None, :] < kept[:, None]).long().to(self._device)
        rows = torch.zeros((1, length, 1), dtype=self._dtype, device=self._device)
        mask = create_bidirectional_mask(config=tower.config, inputs_embeds=rows, attention_mask=is_sound)
        hidden = tower(features, attention_mask=mask).last_hidden_state
        return ImageEmbeddings(self._network.multi_modal_projector(hidden)[0, : int(num_tokens)])
