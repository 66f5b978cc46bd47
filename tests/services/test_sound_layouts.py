"""A sound has as many tokens as in transformers. A file with a key that would change this number is refused."""

import json
from pathlib import Path

import pytest
from tiny_sound_model import AUDIO, SoundOracle, make_model, tone

from pagewire_common.sounds.families import WINDOW, read_sound_layouts


def test_the_number_of_tokens_is_that_of_transformers(tmp_path: Path) -> None:
    oracle, layouts = SoundOracle(make_model(tmp_path)), read_sound_layouts(tmp_path)
    assert layouts is not None
    for samples in (321, 480, 481, 799, 800, 801, 16_000, 31_337, WINDOW - 1, WINDOW):
        assert len(layouts.of(samples, 1).token_ids) == oracle.num_tokens(tone(samples / 16_000)), samples
    assert {*layouts.of(16_000, 1).token_ids} == {AUDIO}
    with pytest.raises(ValueError, match="longer than 30 s"):
        layouts.of(WINDOW + 1, 1)
    for samples in (0, 1, 320):
        with pytest.raises(ValueError, match="shorter than 30 ms"):
            layouts.of(samples, 1)


@pytest.mark.parametrize(("key", "value"), [("hop_length", 80), ("dither", 0.1), ("loudness", 2), ("feature_size", 8)])
def test_files_that_change_features_are_refused(tmp_path: Path, key: str, value: object) -> None:
    file = make_model(tmp_path) / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=key):
        read_sound_layouts(tmp_path)
