"""A tiny random Qwen2-Audio, with its processor's files, and its oracle: transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
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


def tone(seconds: float, seed: int = 0) -> SAMPLES:
    """Noise, whose loudness grows."""
    number = round(seconds * 16_000)
    noise = np.random.default_rng(seed).standard_normal(number) * np.linspace(0.01, 0.2, number)
    return noise.astype(np.float32)


def make_model(path: Path) -> Path:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    torch.manual_seed(0)
    text: dict[str, Any] = {
        "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    audio = {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48, "d_model": 24,
    }  # fmt: skip
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO)
    network = Qwen2AudioForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)  # smaller ones hardly hear
    network.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16, return_attention_mask=True).save_pretrained(path)
    words = {f"t{number}": number for number in range(WORDS)}
    special = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


class SoundOracle:
    """The whole network of transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

        self._network = Qwen2AudioForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(path)

    def num_tokens(self, sound: SAMPLES) -> int:
        """The number that transformers' network keeps of its feature extractor's frames."""
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
        found = self._extractor(
            [*sounds], sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
