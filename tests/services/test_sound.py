"""Sound files as models hear them, and files that no sound comes of."""

import io
import re
import tracemalloc
import wave
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sounds import RATE, container_of, file_of, samples, two_hours, two_hours_of_matroska, wav, without_length

from scheduler_service.frontend.output.request_memory import SOUND_BYTES
from scheduler_service.frontend.speech import ogg
from scheduler_service.frontend.speech.log_mel import WINDOW, log_mel
from scheduler_service.frontend.speech.sound import Sound
from scheduler_service.frontend.speech.sound_error import SoundError


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.001, 3.3, 30])
def test_features_are_those_of_transformers(seconds: float, num_bands: int) -> None:
    from transformers import WhisperFeatureExtractor

    sound = samples(seconds)
    extract = WhisperFeatureExtractor(feature_size=num_bands)
    expected = extract(sound, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(log_mel(sound, num_bands), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_U8", 1e-2),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 1e-6),
        ("FLAC", "PCM_24", 1e-6),
        ("MP3", None, None),
        ("OGG", "VORBIS", None),
    ],
)
def test_windows_of_a_file_are_its_samples(kind: str, subtype: str | None, tolerance: float | None) -> None:
    """Those that overlap as well, and the last one, which is shorter."""
    original = samples(5.5)
    sound = Sound(file_of(original, kind, subtype), 60)
    for start in (0, 100, 2 * RATE + 7, 5 * RATE):
        window, expected = sound.window(start, 2 * RATE), original[start : start + 2 * RATE]
        if tolerance is not None:
            np.testing.assert_allclose(window, expected, atol=tolerance)
        else:  # of what they leave out nothing is heard
            assert abs(len(window) - len(expected)) <= (2500 if start == 5 * RATE else 0)
            assert np.corrcoef(window[:RATE], expected[: len(window)][:RATE])[0, 1] > 0.9 or start > RATE
    assert sound.seconds == pytest.approx(5.5, abs=0.2)
    assert len(sound.window(100 * RATE, RATE)) == 0


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("ipod", "aac"), ("mp4", "alac"), ("mp4", "flac"), ("webm", "libopus"), ("matroska", "libmp3lame")],
)
def test_the_sound_of_a_container_is_that_which_was_put_in(kind: str, codec: str) -> None:
    """Encoders that lose nothing give back every sample, the others nearly."""
    original = samples(5.5)
    sound = Sound(container_of(original, kind, codec, 48_000 if codec == "libopus" else RATE), 60)
    window = np.concatenate([sound.window(0, 2 * RATE), sound.window(2 * RATE, 10 * RATE)])
    if codec == "libopus":  # which was told that the samples are three times as many a second
        original = original[::3]
    whole = min(len(window), len(original))
    assert whole == pytest.approx(len(original), abs=2000)
    assert sound.seconds == pytest.approx(len(original) / RATE, abs=0.15)
    assert np.corrcoef(window[:whole], original[:whole])[0, 1] > (0.999 if codec in ("alac", "flac") else 0.9)


def test_other_rates_and_several_channels_are_heard_as_one_channel_at_the_usual_rate() -> None:
    time = np.arange(3 * 44_100) / 44_100
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    sound = Sound(file_of(np.stack([tone, np.zeros_like(tone)], axis=1), rate=44_100), 60)
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / RATE)
    np.testing.assert_allclose(sound.window(0, 2 * RATE)[100:], expected[100:], atol=2e-3)


def test_samples_that_are_no_numbers_are_silent_and_those_beyond_full_scale_as_loud_as_that() -> None:
    broken = samples(1)
    broken[100:200], broken[300], broken[400] = np.nan, np.inf, -3e38
    window = Sound(file_of(np.stack([broken] * 8, axis=1), subtype="FLOAT"), 60).window(0, WINDOW)
    assert window[[150, 300, 400]] == pytest.approx([0, 1, -1])
    assert np.isfinite(log_mel(window, 80)).all()


def _head(rate: int = RATE, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2000 * channels))
    return buffer.getvalue()


FLAC, MP3, OGG, RF64 = (file_of(samples(20), kind, None) for kind in ("FLAC", "MP3", "OGG", "RF64"))
MP3_WITHOUT_HEAD = MP3[MP3.index(MP3[:3], 3) :]
"""Its first frame has no sound, but says how many there are. Their bitrate changes."""
AAC, WEBM = container_of(samples(20), "ipod", "aac"), container_of(samples(20), "webm", "libopus")
OPUS = file_of(samples(20), "OGG", "OPUS")
FRAGMENTS = container_of(samples(1), "mp4", "aac", movflags="frag_keyframe+empty_moov")


def _claiming(num_samples: int) -> bytes:
    """The head of its fragment says so many samples, and nothing of each."""
    data, place = bytearray(FRAGMENTS), FRAGMENTS.index(b"trun")
    data[place + 4 : place + 12] = (1).to_bytes(4, "big") + num_samples.to_bytes(4, "big")
    return bytes(data)


PAGES, OPUS_PAGES = ([b"OggS" + page for page in file.split(b"OggS")[1:]] for file in (OGG, OPUS))
REFUSED: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "nothing": (b"", "data is empty"),
    "no sound": (b"hello" * 1000, "data is not a readable sound file"),
    "another format": (file_of(samples(1), "AIFF"), "data is AIFF; WAV, FLAC, MP3, OGG, MP4 and WebM are supported"),
    "cut off": (wav(20)[:100_000], "data is cut off: its header says 640000 bytes of samples"),
    "cut off, compressed": (FLAC[: len(FLAC) // 2], "data is damaged or cut off after"),
    "cut off, MP3": (MP3[: len(MP3) // 2], "data is damaged or cut off after"),
    "cut off, without a head": (MP3_WITHOUT_HEAD[:40_000], "data is damaged or cut off after"),
    "cut off, OGG": (OGG[: len(OGG) // 2], "data is cut off: its last page is incomplete"),
    "a page less, OGG": (b"".join(PAGES[:9] + PAGES[10:]), "data is damaged: page 9 is missing"),
    "damaged, OGG": (OGG.replace(PAGES[9], PAGES[9][:-1] + b"?"), "data is damaged in page 9"),
    "cut off, RF64": (RF64[:100_000], "data is cut off: its header says 320000 samples, and there are"),
    "cut off, MP4": (AAC[: len(AAC) // 2], "data is not a readable sound file; WAV"),
    "cut off, index in front": (
        container_of(samples(20), "mp4", "aac", moov_size="30000")[:100_000],
        "data is damaged or cut off after",
    ),
    "damaged, MP4": (AAC[:60_000] + bytes(20_000) + AAC[80_000:], "data is damaged or cut off after"),
    "samples claimed by a fragment": (_claiming(1 << 26), "data has fragments of 67108864 samples, for which it has"),
    "head alone, WebM": (WEBM[:100], "data is not a readable sound file"),
    "two sounds": (container_of(samples(1), "mp4", "aac", number=2), "data has 2 sounds; send a file with one"),
    "another codec": (
        container_of(samples(1), "matroska", "pcm_s16le"),
        "data has a sound in pcm_s16le; aac, opus, vorbis, mp3, flac",
    ),
    "hours, Matroska": (two_hours_of_matroska, "data is a sound of 7200 s or more; at most 3600 s are allowed"),
    "slow, MP4": (container_of(samples(1), "matroska", "flac", rate=3000), "data has 3000 samples a second"),
    "tags": ((b"ID3\4\0\0\0\0\0\2" + bytes(2)) * 17 + MP3, "data begins with more than 16 ID3 tags"),
    "several streams": (OGG + OGG, "data has several streams, of which only one would be decoded"),
    "hours": (two_hours, "data is a sound of 7200 s or more; at most 3600 s are allowed"),
    "slow": (_head(rate=3000), "data has 3000 samples a second; 4000 to 192000 are allowed"),
    "wide": (_head(channels=9), "data has 9 channels; at most 8 are allowed"),
}
"""Hours of sound take seconds to encode, so their test encodes them: every process of `make test` imports this file."""


THEIRS = re.compile(r"FFmpeg|Error|Invalid|Operation|Input/output|implement|internal|decoder|: [A-Z]")
"""Words of the libraries that read sounds."""


def test_a_file_in_fragments_is_heard() -> None:
    assert Sound(FRAGMENTS, 30).window(0, WINDOW).any()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heard_is_refused_in_a_sentence(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(SoundError) as error:
        Sound(data if isinstance(data, bytes) else data(), 3600).window(0, 60 * RATE)
    assert words in str(error.value)
    assert not THEIRS.search(str(error.value))


@given(st.integers(0, len(OGG) - 1), st.integers(0, 7))
def test_an_ogg_file_of_which_any_bit_was_changed_is_refused(place: int, bit: int) -> None:
    changed = bytearray(OGG)
    changed[place] ^= 1 << bit
    with pytest.raises(SoundError):
        Sound(bytes(changed), 60)


@pytest.mark.parametrize("change", ["lost", "twice", "late"])
def test_an_ogg_file_with_a_page_that_is_lost_or_comes_twice_or_late_is_refused(change: str) -> None:
    for number, page in enumerate(PAGES[:-1]):
        following = PAGES[number + 1]
        in_place = {"lost": [following], "twice": [page, page, following], "late": [following, page]}[change]
        with pytest.raises(SoundError):
            Sound(b"".join([*PAGES[:number], *in_place, *PAGES[number + 2 :]]), 60)


def test_an_ogg_file_of_more_pages_than_a_sound_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ogg, "_MAX_PAGES", len(PAGES) + 1)
    Sound(OGG, 60)
    monkeypatch.setattr(ogg, "_MAX_PAGES", len(PAGES))
    with pytest.raises(SoundError, match=f"data has {len(PAGES)} pages or more"):
        Sound(OGG, 60)


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (192_000, 8)])
def test_a_window_takes_less_memory_than_its_call_holds_for_it(rate: int, channels: int) -> None:
    """Besides the file itself, and beside what is under way to the engine: three times what the features take."""
    data = file_of(np.zeros((31 * rate, channels), dtype=np.float32), "FLAC", rate=rate)
    sound = Sound(data, 60)
    log_mel(np.zeros(RATE, dtype=np.float32), 128)  # which keeps its tables
    tracemalloc.start()
    log_mel(sound.window(0, WINDOW), 128)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < SOUND_BYTES - 3 * 128 * 3000 * 4


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (without_length(file_of(samples(3.3), "FLAC")), 3.3),
        (without_length(file_of(samples(3), "FLAC")), 3),
        (wav(3)[:40] + b"\xff" * 4 + wav(3)[44:], 3),
        (OGG + b"TAG" + bytes(125), 20),
        (b"".join(PAGES[:-1]), 19.4),
        (OPUS, 20),
        (b"".join(OPUS_PAGES[:-1]), 19),
        (MP3_WITHOUT_HEAD, 20),
        (MP3_WITHOUT_HEAD + b"TAG" + bytes(125), 20),
        ((b"ID3\4\0\0\0\0\1\2" + bytes(130)) * 16 + MP3, 20),
    ],
    ids=[
        *("FLAC", "FLAC of whole seconds", "WAV of 4 GiB", "OGG with a title", "OGG whose last page is not marked"),
        *("Opus", "Opus whose last page is not marked", "MP3", "MP3 with a title", "MP3 with titles in front"),
    ],
)
def test_a_sound_is_heard_to_its_end_also_where_its_head_does_not_say_how_long_it_is(
    data: bytes, seconds: float
) -> None:
    sound = Sound(data, 60)
    window, expected = sound.window(0, WINDOW), samples(seconds)
    assert len(window) / RATE == pytest.approx(seconds, abs=0.1)
    assert sound.seconds == pytest.approx(seconds, abs=0.1)
    loudness = [np.abs(part[-RATE // 2 :][: RATE // 4]).mean() for part in (window, expected)]
    assert loudness[0] == pytest.approx(loudness[1], rel=0.2)


def test_a_sound_that_is_longer_than_it_says_ends_at_the_limit() -> None:
    """A head that claims nothing: the length of a stream's samples is unknown, and all of them are read."""
    for data in (without_length(file_of(samples(8), "FLAC")), MP3_WITHOUT_HEAD):
        sound = Sound(data, 5)
        with pytest.raises(SoundError, match="at most 5 s are allowed"):
            sound.window(0, WINDOW)
