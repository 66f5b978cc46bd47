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

from pagewire_common.sounds.families import HOP, SAMPLE_BYTES, SAMPLE_RATE, WINDOW
from pagewire_common.start_error import StartError
from worker_service.models.borrowed.network import build_network, pack_linears
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.config.text_part import text_part
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known
from worker_service.models.config.transformers_values import check_sizes
from worker_service.models.images.attention import NAME
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

_ENCODERS = {"qwen2_audio": "qwen2_audio_encoder", "voxtral": "voxtral_encoder"}
"""`model_type` of audio_config, by that of the whole."""


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
        if audio.model_type != (encoder := _ENCODERS[network.model_type]):
            raise ValueError(f"audio_config.model_type is {shown(audio.model_type)}; it must be {encoder}")
        check_sizes(audio)
        keys = ReadKeys(json.get("audio_config") or {}, "audio_config.")
        keys.without_effect("init_std")
        num_heads = audio.num_attention_heads
        # In published files of Voxtral. The network never reads them.
        keys.neutral(head_dim=audio.hidden_size // num_heads, num_key_value_heads=num_heads)
        check_known({**keys.unread(), "model_type": encoder}, audio, AutoModel._model_mapping[type(audio)])
        network = copy.deepcopy(network)
        text = network.text_config
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        return cls(network, AutoModel._model_mapping[type(network)])


class SoundReader:
    """Runs transformers' feature extractor as the family's processor does."""

    def __init__(self, folder: Path, config: SoundConfig) -> None:
        """folder: the model's. Raises StartError."""
        from transformers import AutoFeatureExtractor

        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers may raise any error
            raise StartError(f"the feature extractor in {folder} cannot be read: {error}") from error
        self._fills_windows = config.network.model_type == "voxtral"

    def read(self, data: bytes, width: int, height: int) -> Sequence[Pixels]:
        """The inputs of the sound, or of each of its windows. data: `width` samples, float32. Raises ValueError for
        another number, and the errors of transformers."""
        if len(data) != width * SAMPLE_BYTES or height != 1:
            raise ValueError(f"the sound has {len(data)} bytes, and the request says {width} samples")
        samples, options = np.frombuffer(data, dtype="<f4"), {"sampling_rate": SAMPLE_RATE, "return_tensors": "pt"}
        if self._fills_windows:  # of the whole sound, whose loudest frame counts for all windows
            found = self._extractor(samples, padding=True, truncation=False, pad_to_multiple_of=WINDOW, **options)
            windows = found["input_features"].split(WINDOW // HOP, dim=-1)
            return [{"input_features": window} for window in windows]
        found = self._extractor(samples, padding="max_length", return_attention_mask=True, **options)
        return [{"input_features": found["input_features"], "num_frames": found["attention_mask"].sum(-1)}]


class SoundTower:
    def __init__(self, config: SoundConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights unfilled."""
        self._dtype, self._device = dtype, device
        self._network = build_network(config, dtype, device, NAME)
        del self._network.language_model
        self._fills_windows = config.network.model_type == "voxtral"
        if self._fills_windows:  # as transformers does, whatever the dtype of the others
            self._network.audio_tower.embed_positions.float()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See `Loadable.checkpoint_tensors`."""
        return {f"model.{name}": place for name, place in checkpoint_places(self._network).items()}

    def pack(self) -> None:
        """Called once, after all tensors have been filled."""
        pack_linears([module for module in self._network.modules() if type(module) is nn.Linear])

    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        """Encode one sound, or one window of a sound. Features are filled up to the length of a window."""
        tower, features = self._network.audio_tower, pixels["input_features"].to(self._device, self._dtype)
        if self._fills_windows:
            return ImageEmbeddings(self._network.get_audio_features(features, return_dict=True).pooler_output)
        kept, num_tokens = tower._get_feat_extract_output_lengths(pixels["num_frames"])
        length = (features.shape[-1] - 2) // 2 + 1
        is_sound = (torch.arange(length)[None, :] < kept[:, None]).long().to(self._device)
        rows = torch.zeros((1, length, 1), dtype=self._dtype, device=self._device)
        mask = create_bidirectional_mask(config=tower.config, inputs_embeds=rows, attention_mask=is_sound)
        hidden = tower(features, attention_mask=mask).last_hidden_state
        return ImageEmbeddings(self._network.multi_modal_projector(hidden)[0, : int(num_tokens)])
