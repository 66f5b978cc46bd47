"""Tiny random Qwen2-Audio and Voxtral, with their processors' files, and their oracle: transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

WORDS = 100
AUDIO = WORDS
"""The token id of sounds."""
VOCABULARY = 104
SAMPLES = npt.NDArray[np.float32]
Prompt = Sequence[int | SAMPLES]
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'audio' %}{{ '<|audio_bos|><|AUDIO|>"
    "<|audio_eos|>' }}{% else %} {{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
JOINED = 20
"""Hidden states that Voxtral's projector joins, so that a window has 75 tokens."""
FAMILIES: Mapping[str, dict[str, Any]] = {
    "qwen2_audio": {
        "audio_token_index": AUDIO, "text_config": {"model_type": "qwen2", **_TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48, "d_model": 24,
        },
    },
    "voxtral": {
        "audio_token_id": AUDIO, "text_config": {"model_type": "llama", **_TEXT, "head_dim": 16},
        "audio_config": {
            "model_type": "voxtral_encoder", "num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 24 * JOINED, "hidden_size": 24,
        },
    },
}  # fmt: skip
_TOKENS = {"qwen2_audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], "voxtral": ["[AUDIO]", "[BEGIN_AUDIO]"]}


def tone(seconds: float, seed: int = 0) -> SAMPLES:
    """Noise, whose loudness grows."""
    number = round(seconds * 16_000)
    noise = np.random.default_rng(seed).standard_normal(number) * np.linspace(0.01, 0.2, number)
    return noise.astype(np.float32)


def make_model(path: Path, family: str = "qwen2_audio") -> Path:
    from transformers import AutoConfig, AutoModelForMultimodalLM, WhisperFeatureExtractor

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **json.loads(json.dumps(FAMILIES[family])))
    network = AutoModelForMultimodalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)  # smaller ones hardly hear
        if family == "voxtral":  # as large as words, and more by what is heard than by when
            network.model.audio_tower.conv1.weight.mul_(4)
            network.model.audio_tower.embed_positions.weight.mul_(0.02)
            network.model.multi_modal_projector.linear_2.weight.mul_(0.02)
    network.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16, return_attention_mask=family == "qwen2_audio").save_pretrained(path)
    words = {f"t{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens(_TOKENS[family])
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


class SoundOracle:
    """The whole network of transformers, with its processor's features."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForMultimodalLM, WhisperFeatureExtractor

        self._network = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(path)
        self._is_voxtral = self._network.config.model_type == "voxtral"

    @torch.no_grad()
    def embeddings(self, sound: SAMPLES) -> torch.Tensor:
        """Of Voxtral, [tokens, hidden_size]."""
        found: torch.Tensor = self._network.get_audio_features(**self._features([sound])).pooler_output
        return found

    def num_tokens(self, sound: SAMPLES) -> int:
        """The number that transformers' network has of its feature extractor's frames."""
        if self._is_voxtral:
            return len(self.embeddings(sound))
        tower = self._network.model.audio_tower
        frames = self._features([sound])["feature_attention_mask"].sum(-1)
        return int(tower._get_feat_extract_output_lengths(frames)[1])

    @torch.no_grad()
    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        known: list[int] = []
        for part in prompt:
            known += [part] if isinstance(part, int) else [AUDIO] * self.num_tokens(part)
        start, sounds = len(known), [part for part in prompt if not isinstance(part, int)]
        inputs = self._features(sounds) if sounds else {}
        for _ in range(count):
            row = self._network(input_ids=torch.tensor([known]), use_cache=False, **inputs).logits[0, -1]
            known.append(int(row.argmax()))
        return known[start:]

    def _features(self, sounds: Sequence[SAMPLES]) -> dict[str, torch.Tensor]:
        if self._is_voxtral:
            from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

            processor: Any = SimpleNamespace(feature_extractor=self._extractor)  # the whole needs mistral-common
            options = VoxtralProcessor.audio_kwargs
            return {"input_features": VoxtralProcessor._retrieve_input_features(processor, [*sounds], **options)}
        found = self._extractor(
            [*sounds], sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
