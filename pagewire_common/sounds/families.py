"""Finds out how a model reads sounds, from the files in its folder.

A sound is a row of samples at 16,000 a second, so its layout is that of an image of (number of samples) x 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire_common.images.families import read_file, read_preprocessor, tokenizer_of
from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import Encode
from pagewire_common.images.settings import Settings
from pagewire_common.model_files.shown import shown
from pagewire_common.model_files.tokenizer_config import TokenizerConfig

SAMPLE_RATE = 16_000
HOP = 160
"""Samples between the starts of two frames."""
WINDOW = 30 * SAMPLE_RATE
"""Samples that the network reads at most."""
MAX_SOUNDS = 256
"""Sounds of a request."""
MAX_SAMPLES = 8 * WINDOW
"""Samples of all sounds of a request, which take 15 MB as float32."""
SAMPLE_BYTES = 4
_FAMILY = "qwen2_audio"
_IGNORED = ("chat_template", "tokenizer", "audio_token", "audio_bos_token", "audio_eos_token")


def has_sounds(config: Mapping[str, Any]) -> bool:
    """True if prompts of the model with this config.json may contain sounds."""
    return config.get("model_type") == _FAMILY


def read_sound_layouts(files: Path | Mapping[str, Path], encode: Encode | None = None) -> ImageLayouts | None:
    """See `read_image_layouts`. Returns None for a model without sounds. Raises ValueError with the reason if the
    model's sounds are not read."""
    if isinstance(files, Path):
        files = {file.name: file for file in files.iterdir()}
    config = read_file(files, "config.json")
    if not has_sounds(config):
        if not config.get("audio_config"):
            return None
        family = str(config.get("model_type"))
        raise ValueError(f"sounds of models of type {shown(family)} are not read: no layout of its sounds is known")
    processor = read_file(files, "processor_config.json")
    where, values = read_preprocessor(files, processor, "feature_extractor", "sounds")
    extractor = Settings(where, values)
    extractor.require("feature_extractor_type", "WhisperFeatureExtractor")
    whole = {"chunk_length": 30, "hop_length": HOP, "n_fft": 400, "n_samples": WINDOW, "nb_max_frames": WINDOW // HOP}
    for key, value in {**whole, "sampling_rate": SAMPLE_RATE, "padding_side": "right"}.items():
        extractor.require(key, value)
    for key in ("padding_value", "dither"):
        extractor.require(key, 0.0, 0)
    extractor.ignore("return_attention_mask")  # the processor always asks for it
    network = Settings("config.json", config).group("audio_config")
    bands, of_network = extractor.integer("feature_size", 80), network.integer("num_mel_bins", 128)
    if bands != of_network:
        raise ValueError(f"feature_size in {where} is {bands}, and num_mel_bins in config.json is {of_network}")
    network.require("max_source_positions", WINDOW // HOP // 2)
    extractor.finish()
    rest = Settings("processor_config.json", processor)
    rest.require("processor_class", "Qwen2AudioProcessor")
    rest.ignore(*_IGNORED)
    rest.finish()
    named = TokenizerConfig.read(files).special.get("audio_token")
    text = "<|AUDIO|>" if named is None else named.content
    found = (encode or tokenizer_of(files))(text)
    said = config.get("audio_token_index", config.get("audio_token_id", 151646))
    if list(found) != [said]:
        raise ValueError(f"config.json says {shown(said)} for the audio token; in the tokenizer, it is {list(found)}")
    return ImageLayouts(_FAMILY, said, said, lambda width, height: sound_layout(said, width, height))


def sound_layout(token_id: int, num_samples: int, height: int) -> ImageLayout:
    if height != 1:
        raise ValueError("is an image, and the model reads sounds")
    if num_samples > WINDOW:
        raise ValueError(f"is longer than {WINDOW // SAMPLE_RATE} s")
    num_frames = -(-num_samples // HOP)
    num_tokens = ((num_frames - 1) // 2 - 1) // 2 + 1
    if num_tokens < 1:
        raise ValueError("is shorter than 30 ms, and has no token")
    return ImageLayout((token_id,) * num_tokens, (ImagePart(0, num_tokens),))
