"""Sounds in prompts of parts and in chats: items of samples, 16,000 a second."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from image_chats import HEAD, MARK, TAIL, fake_image_model, image_of, write_image_tokenizer
from sounds import file_of, samples, wav

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.prompts import Image, Part, Sound, set_prompt
from pagewire_common.calls.errors import RequestError
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.sounds.families import MAX_SAMPLES, WINDOW, sound_layout, voxtral_layout
from scheduler_service.frontend.calls.generation import check_request
from scheduler_service.frontend.checking import sound_samples
from scheduler_service.frontend.checking.prompt import encode_prompt
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request_memory import more_memory, sample_bytes
from scheduler_service.frontend.speech import sound as opened

TEMPLATE = (
    HEAD + "{% for c in m['content'] %}{% if c['type'] == 'audio' %}{{ '" + MARK + "' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}" + TAIL
)
SOUND = Sound(wav(0.3))
NUM_TOKENS = 7
LAYOUTS = ImageLayouts("fake", 259, 259, partial(sound_layout, 259), max_samples=WINDOW)
OF_WINDOWS = ImageLayouts("fake", 259, 259, partial(voxtral_layout, 5, 259), max_samples=MAX_SAMPLES)
"""Layouts with 5 tokens for each window."""


@pytest.fixture(scope="module")
def model(byte_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("sounds") / "lists"
    write_image_tokenizer(directory, TEMPLATE)
    return replace(fake_image_model(byte_model, directory), images=None, sounds=LAYOUTS)


def request(*parts: Part, **fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    set_prompt(message, parts)
    return message


def chat(*content: str | Image | Sound) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    set_prompt(message, [{"role": "user", "content": list(content)}])
    return message


async def test_a_sound_is_an_item_of_its_samples(model: ServedModel) -> None:
    checked = await check_request(request([5, 6], SOUND, [7], SOUND), "a", model)
    assert list(checked.prompt_token_ids) == [5, 6, *[259] * NUM_TOKENS, 7, *[259] * NUM_TOKENS]
    first, second = checked.items
    assert (first.start, second.start, first.num_embeddings) == (2, 3 + NUM_TOKENS, NUM_TOKENS)
    assert first.digest == second.digest
    assert first.image == (4800, 1, 0)
    found = np.frombuffer(first.data, dtype="<f4")
    assert np.abs(found - samples(0.3)).max() < 1e-4


async def test_a_sound_may_have_many_windows(model: ServedModel) -> None:
    model, sound = replace(model, sounds=OF_WINDOWS, encoder_cache_size=5), samples(40)
    checked = await check_request(request([5, 6], Sound(file_of(sound)), [7], SOUND), "a", model)
    assert [(item.start, item.num_embeddings, item.image) for item in checked.items] == [
        (2, 5, (len(sound), 1, 0)), (7, 5, (len(sound), 1, 1)), (13, 5, (4800, 1, 0)),
    ]  # fmt: skip
    assert checked.items[0].digest == checked.items[1].digest
    assert np.abs(np.frombuffer(checked.items[0].data, dtype="<f4") - sound).max() < 1e-4


async def test_a_long_sound_leaves_threads_to_other_requests(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with one thread, another request waits for one window at most."""
    begun, done = asyncio.Event(), list[str]()

    class OneThread(ThreadPoolExecutor):
        def submit(self, *work: Any, **more: Any) -> Any:
            begun.set()
            return super().submit(*work, **more)

    class Heard(opened.Sound):
        def window(self, start: int, length: int) -> opened.Samples:
            done.append("window")
            return super().window(start, length)

    monkeypatch.setattr(sound_samples, "Sound", Heard)
    with OneThread(1) as thread:
        asyncio.get_running_loop().set_default_executor(thread)
        long = request(Sound(wav(200)))
        reading = asyncio.create_task(check_request(long, "a", replace(model, sounds=OF_WINDOWS)))
        await begun.wait()
        await asyncio.to_thread(done.append, "other")
        await reading
    assert done.index("other") <= 1
    assert len(done) > 7


async def test_channels_are_mixed_and_rates_converted(model: ServedModel) -> None:
    time = np.arange(14_400) / 48_000
    tone = 0.3 * np.sin(2 * np.pi * 440 * time)
    stereo = np.stack((tone * 1.5, tone * 0.5), axis=1).astype(np.float32)
    (item,) = (await check_request(request([5], Sound(file_of(stereo, rate=48_000))), "a", model)).items
    assert item.image == (4800, 1, 0)
    wanted = 0.3 * np.sin(2 * np.pi * 440 * np.arange(4800) / 16_000)
    assert np.abs(np.frombuffer(item.data, dtype="<f4") - wanted)[200:-200].max() < 1e-3


async def test_samples_that_are_no_numbers_are_silence(model: ServedModel) -> None:
    broken = samples(0.3)
    broken[1000:1100], broken[2000] = np.nan, np.inf
    (item,) = (await check_request(request([5], Sound(file_of(broken, subtype="FLOAT"))), "a", model)).items
    found = np.frombuffer(item.data, dtype="<f4")
    assert np.isfinite(found).all()
    assert not found[1000:1100].any()


async def test_the_chat_template_decides_where_a_sound_is(model: ServedModel) -> None:
    checked = await check_request(chat("a", SOUND, "b"), "a", model)
    (item,) = checked.items
    assert list(checked.prompt_token_ids[item.start : item.start + NUM_TOKENS]) == [259] * NUM_TOKENS
    assert list(checked.prompt_token_ids).count(259) == NUM_TOKENS
    message = chat("a", SOUND, MARK)
    message.parse_special_tokens = True
    with pytest.raises(RequestError, match="chat has 1 sounds, and 2 placeholders of sounds"):
        await check_request(message, "a", model)


Change = Callable[[ServedModel], ServedModel]
REFUSED: dict[str, tuple[pb.GenerateRequest, Change, str]] = {
    "empty": (request([5], Sound(b"")), lambda model: model, "parts[1].sound: data is empty"),
    "cut off": (request(Sound(SOUND.data[:4000])), lambda model: model, "parts[0].sound: data is cut off"),
    "no sound": (request(Sound(b"RIFFhello")), lambda model: model, "data is not a readable sound file"),
    "an image": (request(Sound(image_of(2, 2))), lambda model: model, "data is not a readable sound file"),
    "too short": (
        request(Sound(wav(0.02))),
        lambda model: model,
        "parts[0].sound has no token; it must be longer than 20 ms",
    ),
    "too long": (request(Sound(wav(31))), lambda model: model, "parts[0].sound: data is a sound of 31 s or more; at"),
    "in a chat": (chat("a", Sound(b"x")), lambda model: model, "chat.messages[0].parts[1].sound: data is not"),
    "an image in a chat": (chat(Image(image_of(2, 2)), SOUND), lambda model: model, "this model reads no images"),
    "log-probabilities": (
        request(SOUND, sampling=pb.SamplingParams(prompt_logprobs=1)),
        lambda model: model,
        "sampling.prompt_logprobs is not possible with parts",
    ),
    "longer than sounds of many windows": (
        request([5], Sound(wav(241))),
        lambda model: replace(model, sounds=OF_WINDOWS),
        "parts[1].sound: data is a sound of 241 s or more; at most 240 s are allowed",
    ),
    "many tokens": (
        request(SOUND),
        lambda model: replace(model, encoder_cache_size=6),
        "parts[0].sound has a part of 7 tokens; the workers read at most 6",
    ),
    "no sounds": (
        chat("a", SOUND),
        lambda model: replace(model, sounds=None, sounds_refusal="no layout is known"),
        "chat.messages[0].parts[1].sound: this model reads no sounds in prompts: no layout is known",
    ),
    "no encoder": (
        request(SOUND),
        lambda model: replace(model, encoder_cache_size=0),
        "this model reads no sounds in prompts: its workers encode no sounds",
    ),
}


@pytest.mark.parametrize(("message", "change", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_is_wrong_with_a_sound_is_said(
    message: pb.GenerateRequest, change: Change, reason: str, model: ServedModel
) -> None:
    with pytest.raises(RequestError) as raised:
        await check_request(message, "a", change(model))
    assert reason in str(raised.value)
    code = grpc.StatusCode.UNIMPLEMENTED if "this model reads no" in reason else grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.code is code


async def test_sounds_of_a_request_have_limits_together(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "scheduler_service.frontend.checking.prompt_builder."
    for name, most, reason in (
        ("MAX_BYTES", 2 * len(SOUND.data), f"the sounds up to parts[2].sound have {3 * len(SOUND.data)} bytes"),
        ("MAX_SOUNDS", 2, "parts[2].sound is one sound too many; at most 2 are allowed"),
        ("MAX_SAMPLES", 9600, "the sounds up to parts[2].sound take 0.9 s; at most 0.6 s are allowed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place + name, most)
            assert len((await check_request(request(SOUND, SOUND), "a", model)).items) == 2
            with pytest.raises(RequestError) as raised:
                await check_request(request(SOUND, SOUND, SOUND), "a", model)
            assert reason in str(raised.value)


def test_the_first_30_seconds_of_each_sound_count_as_memory_at_admission() -> None:
    for make in (request, chat):
        assert [sample_bytes(make(*[SOUND] * n)) for n in (0, 1, 2)] == [n * 3 * 30 * 16_000 * 4 for n in (0, 1, 2)]
        assert sample_bytes(make(*[SOUND] * 9)) == 3 * 240 * 16_000 * 4


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize(("seconds", "num_more"), [(0.3, 0), (29, 0), (200, 6), (240, 7)])
async def test_further_seconds_count_before_they_are_decoded(
    model: ServedModel, seconds: float, num_more: int, is_stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, if the header states them."""
    held, window = list[int](), 3 * 30 * 16_000 * 4
    if not is_stated:
        monkeypatch.setattr(opened.Sound, "stated_seconds", 0.0)

    async def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        if sum(held) > 7 * window:
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")

    more_memory.set(hold)
    await sound_samples.read_samples("sound", wav(30), WINDOW)
    assert not held, "no longer sounds are read"
    model = replace(model, sounds=OF_WINDOWS)
    await check_request(request(Sound(wav(seconds))), "a", model)
    assert held == ([num_more * window] * (num_more > 0) if is_stated else num_more * [window])
    with pytest.raises(RequestError, match="too much"):
        await check_request(request(Sound(wav(230)), Sound(wav(230))), "a", model)


async def test_the_samples_of_a_sound_whose_tokens_are_counted_are_not_kept(model: ServedModel) -> None:
    """A file of 3 KB can have 15 MB of samples."""
    message = pb.TokenizeRequest(chat=chat(SOUND).chat)
    (item,) = (await encode_prompt(message, model)).items
    assert item.data == b""
    (kept,) = (await encode_prompt(chat(SOUND), model)).items
    assert (item.num_embeddings, len(kept.data) > 0) == (kept.num_embeddings, True)
