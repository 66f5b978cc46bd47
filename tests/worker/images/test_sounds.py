"""A decoder that reads sounds has transformers' tokens. The keys of its config.json are obeyed or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_worker import ImageWorker
from tiny_image_models import Picture
from tiny_sound_model import SAMPLES, Prompt, SoundOracle, make_model, tone

from pagewire_common.sounds.families import WINDOW
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import read_config
from worker_service.models.sounds.network import SoundConfig, SoundReader, SoundTower

COUNT = 4


def two_windows() -> SAMPLES:
    """A quiet window with silence inside, and a loud one. The loudest frame of both says how low silence is."""
    sound = tone(31, seed=1)
    sound[:WINDOW] *= 0.01
    sound[100_000:300_000] = 0
    return sound


LONG = {"qwen2_audio": tone(1.1, seed=1), "voxtral": two_windows()}


def prompts(short: SAMPLES, long: SAMPLES) -> list[Prompt]:
    return [[5, 9, short, 14], [7, 8, 9], [long, 6, short, 4], [short, 6, long, 4], [11, long]]


@pytest.mark.parametrize("family", LONG)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family)
    oracle, worker, asked_for = SoundOracle(path), ImageWorker(path), prompts(tone(0.3), LONG[family])
    expected = {number: oracle.greedy(prompt, COUNT) for number, prompt in enumerate(asked_for)}
    for chunk in (4096, 7):
        worker.begin()
        asked = [
            worker.ask(
                number,
                [part if isinstance(part, int) else Picture(part.tobytes(), len(part), 1) for part in prompt],
            )
            for number, prompt in enumerate(asked_for)
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


# Written without a copy of the published file, by transformers' converter.
VOXTRAL_AUDIO: dict[str, Any] = {
    "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "dropout": 0.0, "head_dim": 64,
    "hidden_size": 1280, "initializer_range": 0.02, "intermediate_size": 5120, "layerdrop": 0.0,
    "max_source_positions": 1500, "model_type": "voxtral_encoder", "num_attention_heads": 20, "num_hidden_layers": 32,
    "num_key_value_heads": 20, "num_mel_bins": 128, "scale_embedding": False, "vocab_size": 51866,
}  # fmt: skip
VOXTRAL: dict[str, Any] = {
    "architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_token_id": 24,
    "hidden_size": 3072, "projector_hidden_act": "gelu", "torch_dtype": "bfloat16", "vocab_size": 131072,
    "audio_config": VOXTRAL_AUDIO,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000.0,
        "sliding_window": None, "use_cache": True, "vocab_size": 131072,
    },
}  # fmt: skip
CONFIGS = {"qwen2_audio": PUBLISHED, "voxtral": VOXTRAL}


def test_a_config_of_the_published_size_is_read() -> None:
    config, network = read_config(PUBLISHED), SoundConfig.from_json(PUBLISHED).network
    assert (config.hidden_size, len(config.layers), config.vocabulary_size) == (4096, 32, 156_032)
    assert (network.audio_config.d_model, network.audio_config.encoder_layers) == (1280, 32)
    config, network = read_config(VOXTRAL), SoundConfig.from_json(VOXTRAL).network
    assert (config.hidden_size, len(config.layers), config.vocabulary_size) == (3072, 30, 131_072)
    assert (network.audio_config.hidden_size, network.audio_config.num_hidden_layers) == (1280, 32)


def said(text: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """The properties of Voxtral's text network and its rotary frequencies."""
    json = {name: value for name, value in VOXTRAL.items() if name not in ("hidden_size", "vocab_size")}
    config = read_config(json | {"text_config": text})
    assert isinstance(config, DecoderConfig)
    rope = config.layers[0].rope
    assert rope is not None
    return vars(config) | {"layers": len(config.layers)}, rope.inverse_frequencies.tolist()


def test_what_a_text_network_does_not_say_is_as_in_transformers() -> None:
    """Voxtral's classes have other defaults for a text network of Llama than Llama has."""
    whole = VOXTRAL["text_config"]
    assert said({}) == said(whole)
    assert said({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}) == said(whole | {"rope_theta": 5e5})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"odd": 1}, "odd = 1"),
        ({"head_dim": 32}, "head_dim = 32"),
        ({"num_attention_heads": -1, "encoder_attention_heads": -1}, "num_attention_heads is -1; it must be a whole"),
        ({"scale_embedding": True}, "scale_embedding is True"),
        ({"model_type": "whisper"}, r"audio_config.model_type is 'whisper'; it must be \w+_encoder"),
    ],
)
def test_what_the_network_for_sounds_does_not_read_is_refused(family: str, change: dict[str, Any], reason: str) -> None:
    config = CONFIGS[family]
    with pytest.raises(ValueError, match=reason):
        SoundConfig.from_json(config | {"audio_config": config["audio_config"] | change})


@pytest.mark.parametrize("family", CONFIGS)
def test_what_the_text_network_does_not_read_is_refused(family: str) -> None:
    read_config(CONFIGS[family] | {"is_encoder_decoder": False})
    for change in ({"odd": 1}, {"hidden_size": 7}, {"is_encoder_decoder": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} = "):
            read_config(CONFIGS[family] | change)


def test_a_sound_of_many_windows_is_encoded_window_by_window(tmp_path: Path) -> None:
    """So the memory of the network does not grow with the sound."""
    path, sound = make_model(tmp_path, "voxtral"), two_windows()
    encoder = ImageWorker(path).worker.runner.images
    assert encoder is not None
    config = SoundConfig.from_json(json.loads((path / "config.json").read_text()))
    parts = SoundReader(path, config).read(sound.tobytes(), len(sound), 1)
    assert [part["input_features"].shape for part in parts] == [(1, 16, 3000)] * 2
    with torch.inference_mode():
        found = torch.cat([encoder._tower.encode(part).embeddings for part in parts])
    torch.testing.assert_close(found, SoundOracle(path).embeddings(sound), rtol=1e-4, atol=1e-4)


def test_positions_of_voxtral_stay_in_float32() -> None:
    tower = SoundTower(SoundConfig.from_json(VOXTRAL), torch.bfloat16, torch.device("meta"))
    dtypes = {name: tensor.dtype for name, tensor in tower.checkpoint_tensors().items()}
    assert dtypes.pop("model.audio_tower.embed_positions.weight") is torch.float32
    assert {*dtypes.values()} == {torch.bfloat16}
