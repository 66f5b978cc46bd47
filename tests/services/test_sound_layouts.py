"""A sound has as many tokens as in transformers. A file with a key that would change this number is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_sound_model import AUDIO, JOINED, SoundOracle, make_model, tone

from pagewire_common.sounds.families import MAX_SAMPLES, WINDOW, read_sound_layouts


def change(file: Path, **values: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | values))
    return found


def test_the_number_of_tokens_is_that_of_transformers(tmp_path: Path) -> None:
    oracle, layouts = SoundOracle(make_model(tmp_path)), read_sound_layouts(tmp_path)
    assert layouts is not None
    for samples in (321, 480, 481, 799, 800, 801, 16_000, 31_337, WINDOW - 1, WINDOW):
        assert len(layouts.of(samples, 1).token_ids) == oracle.num_tokens(tone(samples / 16_000)), samples
    assert {*layouts.of(16_000, 1).token_ids} == {AUDIO}
    with pytest.raises(ValueError, match="longer than 30 s"):
        layouts.of(WINDOW + 1, 1)
    for samples in (0, 1, 320):
        with pytest.raises(ValueError, match="longer than 20 ms"):
            layouts.of(samples, 1)


def test_voxtral_has_whole_windows_as_in_transformers(tmp_path: Path) -> None:
    oracle, layouts = SoundOracle(make_model(tmp_path, "voxtral")), read_sound_layouts(tmp_path)
    assert layouts is not None
    for samples in (1, WINDOW, WINDOW + 1):
        assert len(layouts.of(samples, 1).token_ids) == oracle.num_tokens(tone(samples / 16_000)), samples
    assert layouts.of(WINDOW + 1, 1).parts == ((0, 1500 // JOINED), (1500 // JOINED, 2 * 1500 // JOINED))
    assert {*layouts.of(1, 1).token_ids} == {AUDIO}
    assert len(layouts.of(MAX_SAMPLES, 1).parts) == 8
    with pytest.raises(ValueError, match="longer than 240 s"):
        layouts.of(MAX_SAMPLES + 1, 1)
    with pytest.raises(ValueError, match="no samples"):
        layouts.of(0, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hop_length", 80),
        ("dither", 0.1),
        ("loudness", 2),
        ("feature_size", 8),
        ("do_normalize", True),
        ("image_mean", 2),
    ],
)
def test_files_that_change_features_are_refused(tmp_path: Path, key: str, value: object) -> None:
    change(make_model(tmp_path) / "preprocessor_config.json", **{key: value})
    with pytest.raises(ValueError, match=key):
        read_sound_layouts(tmp_path)


def test_files_of_voxtral_that_contradict_its_processor_are_refused(tmp_path: Path) -> None:
    file = make_model(tmp_path, "voxtral") / "config.json"
    config = change(file)
    for values, reason in (
        ({"max_source_positions": 750}, "max_source_positions in audio_config of config.json is 750"),
        (
            {"intermediate_size": 24 * 7},
            "intermediate_size in audio_config is 168; it must be hidden_size, which is 24",
        ),
        ({"intermediate_size": 12}, "intermediate_size in audio_config is 12"),
        ({"d_model": 48}, "hidden_size and d_model in audio_config differ"),
    ):
        change(file, audio_config=config["audio_config"] | values)
        with pytest.raises(ValueError, match=reason):
            read_sound_layouts(tmp_path)
    change(file, audio_config=config["audio_config"], audio_token_id=7)
    with pytest.raises(ValueError, match=r"config\.json says 7 for the audio token; in the tokenizer, it is \[100\]"):
        read_sound_layouts(tmp_path)
    change(file, audio_token_id=None)
    with pytest.raises(ValueError, match=r"config\.json says None for the audio token"):
        read_sound_layouts(tmp_path)
    change(file, audio_token_id=AUDIO)
    change(tmp_path / "processor_config.json", processor_class="Qwen2AudioProcessor")
    with pytest.raises(ValueError, match="it must be 'VoxtralProcessor'"):
        read_sound_layouts(tmp_path)
