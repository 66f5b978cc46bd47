"""Finds out how a model reads sounds, from the files in its folder.

A sound is a row of samples at 16,000 a second, so its layout is that of an image of (number of samples) x 1.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
"""Samples that the network reads at a time."""
MAX_SOUNDS = 256
"""Sounds of a request."""
MAX_SAMPLES = 8 * WINDOW
"""Samples of all sounds of a request, which take 15 MB as float32."""
SAMPLE_BYTES = 4
_STATES = WINDOW // HOP // 2
"""Hidden states of a window: the network's convolutions join two frames."""


class _Family(NamedTuple):
    """`layouts_of`: from `audio_config`, makes the function of an audio token, a number of samples and a height that
    returns the layout."""

    processor: str
    token: str
    """The text of the audio token, unless the tokenizer's files name another."""
    token_keys: Sequence[str]
    """Keys of config.json with the id of the audio token."""
    max_samples: int
    """Samples of one sound."""
    layouts_of: Callable[[Settings], Callable[[int, int, int], ImageLayout]]
    token_id: int | None = None
    """The default id of the audio token."""
    ignored: Sequence[str] = ()
    """Keys of processor_config.json."""


def has_sounds(config: Mapping[str, Any]) -> bool:
    """True if prompts of the model with this config.json may contain sounds."""
    return config.get("model_type") in _FAMILIES


def read_sound_layouts(files: Path | Mapping[str, Path], encode: Encode | None = None) -> ImageLayouts | None:
    """See `read_image_layouts`. Returns None for a model without sounds. Raises ValueError with the reason if the
    model's sounds are not read."""
    if isinstance(files, Path):
        files = {file.name: file for file in files.iterdir()}
    config = read_file(files, "config.json")
    name = str(config.get("model_type"))
    if not has_sounds(config):
        if not config.get("audio_config"):
            return None
        raise ValueError(f"sounds of models of type {shown(name)} are not read: no layout of its sounds is known")
    family, processor = _FAMILIES[name], read_file(files, "processor_config.json")
    network = Settings("config.json", config).group("audio_config")
    network.require("max_source_positions", _STATES)
    where, values = read_preprocessor(files, processor, "feature_extractor", "sounds")
    _check_extractor(where, Settings(where, values), network.integer("num_mel_bins", 128))
    rest = Settings("processor_config.json", processor)
    rest.require("processor_class", family.processor)
    rest.ignore("chat_template", "tokenizer", *family.ignored)
    rest.finish()
    named = TokenizerConfig.read(files).special.get("audio_token")
    text = family.token if named is None else named.content
    found = (encode or tokenizer_of(files))(text)
    said = next((config[key] for key in family.token_keys if config.get(key) is not None), family.token_id)
    if type(said) is not int or [*found] != [said]:
        raise ValueError(f"config.json says {shown(said)} for the audio token; in the tokenizer, it is {list(found)}")
    return ImageLayouts(name, said, said, partial(family.layouts_of(network), said), max_samples=family.max_samples)


def _check_extractor(where: str, extractor: Settings, num_bands: int) -> None:
    """`num_bands`: the frequency bands in `audio_config`."""
    extractor.require("feature_extractor_type", "WhisperFeatureExtractor")
    whole = {"chunk_length": 30, "hop_length": HOP, "n_fft": 400, "n_samples": WINDOW, "nb_max_frames": WINDOW // HOP}
    for key, value in {**whole, "sampling_rate": SAMPLE_RATE, "padding_side": "right"}.items():
        extractor.require(key, value)
    for key in ("padding_value", "dither"):
        extractor.require(key, 0.0, 0)
    extractor.require("do_normalize", False)
    extractor.ignore("return_attention_mask")  # Qwen2-Audio's processor always asks for it, and Voxtral's never
    if (bands := extractor.integer("feature_size", 80)) != num_bands:
        raise ValueError(f"feature_size in {where} is {bands}, and num_mel_bins in config.json is {num_bands}")
    extractor.finish()


def sound_layout(token_id: int, num_samples: int, height: int) -> ImageLayout:
    """Qwen2-Audio's layout: tokens for the frames that have samples."""
    _check_height(height)
    if num_samples > WINDOW:
        raise ValueError(f"is longer than {WINDOW // SAMPLE_RATE} s")
    num_frames = -(-num_samples // HOP)
    num_tokens = ((num_frames - 1) // 2 - 1) // 2 + 1
    if num_tokens < 1:
        raise ValueError("has no token; it must be longer than 20 ms")
    return ImageLayout((token_id,) * num_tokens, (ImagePart(0, num_tokens),))


def voxtral_layout(of_window: int, token_id: int, num_samples: int, height: int) -> ImageLayout:
    """Voxtral's layout: the sound is filled up to whole windows, each of which is a part of `of_window` tokens."""
    _check_height(height)
    if num_samples > MAX_SAMPLES:
        raise ValueError(f"is longer than {MAX_SAMPLES // SAMPLE_RATE} s")
    if not num_samples:
        raise ValueError("has no samples")
    num_windows = -(-num_samples // WINDOW)
    parts = tuple(ImagePart(number * of_window, (number + 1) * of_window) for number in range(num_windows))
    return ImageLayout((token_id,) * (num_windows * of_window), parts)


def _voxtral_layouts(network: Settings) -> Callable[[int, int, int], ImageLayout]:
    size = _size(network, "hidden_size", "d_model", 1280)
    joined = _size(network, "intermediate_size", "encoder_ffn_dim", 5120)
    num_joined, rest = divmod(joined, size)
    if rest or _STATES % num_joined:
        raise ValueError(
            f"intermediate_size in audio_config is {joined}; it must be hidden_size, which is {size}, times a divisor "
            f"of {_STATES}, because the projector joins hidden states of one window"
        )
    return partial(voxtral_layout, _STATES // num_joined)


def _size(network: Settings, name: str, other: str, default: int) -> int:
    """`other`: a second name of the key."""
    found = {network.integer(key, default) for key in (name, other) if key in network}
    if len(found) > 1:
        raise ValueError(f"{name} and {other} in audio_config differ")
    return min(found, default=default)


def _check_height(height: int) -> None:
    if height != 1:
        raise ValueError("is an image, and the model reads sounds")


_FAMILIES: Mapping[str, _Family] = {
    "qwen2_audio": _Family(
        "Qwen2AudioProcessor",
        "<|AUDIO|>",
        ("audio_token_index", "audio_token_id"),
        WINDOW,
        lambda _: sound_layout,
        token_id=151646,
        ignored=("audio_token", "audio_bos_token", "audio_eos_token"),
    ),
    "voxtral": _Family("VoxtralProcessor", "[AUDIO]", ("audio_token_id",), MAX_SAMPLES, _voxtral_layouts),
}
