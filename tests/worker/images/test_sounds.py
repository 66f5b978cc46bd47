"""A decoder that reads sounds has transformers' tokens. The keys of its config.json are obeyed or refused."""

from pathlib import Path
from typing import Any

import pytest
from image_worker import ImageWorker
from tiny_image_models import Picture
from tiny_sound_model import Prompt, SoundOracle, make_model, tone

from worker_service.models.registry import read_config
from worker_service.models.sounds.network import SoundConfig

COUNT = 4
SHORT, LONG = tone(0.3), tone(1.1, seed=1)
PROMPTS: list[Prompt] = [[5, 9, SHORT, 14], [7, 8, 9], [LONG, 6, SHORT, 4], [SHORT, 6, LONG, 4], [11, LONG]]


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    oracle, worker = SoundOracle(path), ImageWorker(path)
    expected = {number: oracle.greedy(prompt, COUNT) for number, prompt in enumerate(PROMPTS)}
    for chunk in (4096, 7):
        worker.begin()
        asked = [
            worker.ask(
                number,
                [part if isinstance(part, int) else Picture(part.tobytes(), len(part), 1) for part in prompt],
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        assert worker.generate(asked, COUNT, chunk) == expected, chunk


AUDIO: dict[str, Any] = {
    "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "d_model": 1280,
    "dropout": 0.0, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0,
    "encoder_layers": 32, "init_std": 0.02, "max_source_positions": 1500, "model_type": "qwen2_audio_encoder",
    "num_hidden_layers": 32, "num_mel_bins": 128, "scale_embedding": False,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "ignore_index": -100,
    "audio_token_index": 151646, "torch_dtype": "bfloat16", "vocab_size": 156032, "audio_config": AUDIO,
    "text_config": {
        "bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "max_position_embeddings": 8192,
        "model_type": "qwen2", "rms_norm_eps": 1e-05, "rope_theta": 10000, "sliding_window": 32768,
        "torch_dtype": "bfloat16", "use_mrope": False, "vocab_size": 156032,
    },
}  # fmt: skip


def test_a_config_of_the_published_size_is_read() -> None:
    config, network = read_config(PUBLISHED), SoundConfig.from_json(PUBLISHED).network
    assert (config.hidden_size, len(config.layers), config.vocabulary_size) == (4096, 32, 156_032)
    assert (network.audio_config.d_model, network.audio_config.encoder_layers) == (1280, 32)


def test_what_the_network_for_sounds_does_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="odd = 1"):
        SoundConfig.from_json(PUBLISHED | {"audio_config": AUDIO | {"odd": 1}})
    with pytest.raises(ValueError, match="odd = 1"):
        read_config(PUBLISHED | {"odd": 1})
