"""Puts together the tokens and items of a prompt that is not only text."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import grpc
import numpy as np

from pagewire_common.calls.errors import RequestError
from pagewire_common.images.head import MAX_BYTES, MAX_IMAGES, MAX_PIXELS_TOGETHER
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.sounds.families import MAX_SAMPLES, MAX_SOUNDS, SAMPLE_RATE
from scheduler_service.core import ImagePart, PromptItem
from scheduler_service.core.groups.prompt_item import PLACEHOLDER
from scheduler_service.frontend.checking.checks import check_context, check_token_ids, invalid, take_token_ids
from scheduler_service.frontend.checking.sound_samples import count_samples, read_samples
from scheduler_service.frontend.model import ServedModel


class PromptBuilder:
    """The tokens and items of the parts that have been added. `name`: the field that contains them, for errors.
    `num_images`: images of the whole prompt. `is_one_text`: whether newlines around an image are joined with the
    text's, as in a text that contains images. `is_counted`: whether only the tokens are wanted, and not the items'
    data."""

    def __init__(
        self,
        model: ServedModel,
        name: str = "parts",
        *,
        num_images: int = 0,
        is_one_text: bool = False,
        is_counted: bool = False,
    ) -> None:
        self.token_ids = array("I")
        self.items: list[PromptItem] = []
        self._model, self._name, self._is_one_text, self._is_counted = model, name, is_one_text, is_counted
        self._images_of_prompt = num_images
        self._num_images = self._num_image_bytes = self._num_pixels = 0
        self._num_sounds = self._num_sound_bytes = self._num_samples = 0

    def add_tokens(self, name: str, token_ids: "array[int]") -> None:
        check_token_ids(name, token_ids, self._model)
        self.token_ids += token_ids
        check_context(self._name, len(self.token_ids), self._model)

    def add_item(self, digest: bytes, num_embeddings: int, data: bytes) -> None:
        start = len(self.token_ids)
        check_context(self._name, start + num_embeddings, self._model)
        self.token_ids += array("I", [PLACEHOLDER]) * num_embeddings
        self.items.append(PromptItem(digest, start, num_embeddings, len(data), data))

    async def add_image(self, name: str, data: bytes) -> None:
        """`data`: an image file. Raises RequestError, with the image's name in errors about it."""
        layouts = require_layouts(name, self._model)
        self._num_images += 1
        self._num_image_bytes += len(data)
        if self._num_images > MAX_IMAGES:
            invalid(f"{name} is one image too many; at most {MAX_IMAGES} are allowed")
        if self._num_image_bytes > MAX_BYTES:
            invalid(f"the images up to {name} have {self._num_image_bytes} bytes; at most {MAX_BYTES} are allowed")
        checked = await self._model.image_checker.check(name, data)
        self._num_pixels += checked.width * checked.height
        if self._num_pixels > MAX_PIXELS_TOGETHER:
            invalid(
                f"the images up to {name} have {self._num_pixels} pixels; at most {MAX_PIXELS_TOGETHER} are allowed"
            )
        self._add(name, layouts, checked.digest, checked.width, checked.height, data)

    async def add_sound(self, name: str, data: bytes) -> None:
        """`data`: a sound file. Raises RequestError, with the sound's name in errors about it."""
        layouts = require_layouts(name, self._model)
        self._num_sounds += 1
        self._num_sound_bytes += len(data)
        if self._num_sounds > MAX_SOUNDS:
            invalid(f"{name} is one sound too many; at most {MAX_SOUNDS} are allowed")
        if self._num_sound_bytes > MAX_BYTES:
            invalid(f"the sounds up to {name} have {self._num_sound_bytes} bytes; at most {MAX_BYTES} are allowed")
        digest, samples = b"", b""
        if self._is_counted:
            num_samples = await count_samples(name, data, layouts.max_samples)
        else:
            digest, num_samples, samples = await read_samples(name, data, layouts.max_samples)
        self._num_samples += num_samples
        if self._num_samples > MAX_SAMPLES:
            seconds, most = self._num_samples / SAMPLE_RATE, MAX_SAMPLES / SAMPLE_RATE
            invalid(f"the sounds up to {name} take {seconds:.1f} s; at most {most:g} s are allowed")
        self._add(name, layouts, digest, num_samples, 1, samples)

    def _add(self, name: str, layouts: ImageLayouts, digest: bytes, width: int, height: int, data: bytes) -> None:
        try:
            layout = layouts.among(self._images_of_prompt, width, height)
        except ValueError as error:
            invalid(f"{name} {error}")
        most = self._model.encoder_cache_size
        if (largest := max(part.stop - part.start for part in layout.parts)) > most:
            limits = "--encoder-cache-size, or --max-num-batched-tokens minus --max-num-seqs"
            invalid(f"{name} has a part of {largest} tokens; the workers read at most {most} ({limits})")
        token_ids = array("I", layout.token_ids)
        self.add_tokens(name, layouts.join_newlines(self.token_ids, token_ids) if self._is_one_text else token_ids)
        start = len(self.token_ids) - len(token_ids)
        for number, part in enumerate(layout.parts, layout.first_part):
            image = ImagePart(width, height, number)
            size = part.stop - part.start
            self.items.append(PromptItem(digest, start + part.start, size, len(data), data, image))


async def expand_images(
    token_ids: Sequence[int], images: Sequence[tuple[str, bytes]], model: ServedModel, *, is_counted: bool = False
) -> PromptBuilder:
    """Replace the placeholders in a chat's tokens by the tokens of its images.

    `images`: names for errors, and files: all images, or all sounds. `is_counted`: see `PromptBuilder`. Raises
    RequestError, also if their number is not that of the placeholders.
    """
    rendered = await take_token_ids(token_ids)
    built = PromptBuilder(model, "chat", num_images=len(images), is_one_text=True, is_counted=is_counted)
    if not images:
        built.add_tokens("chat", rendered)
        return built
    layouts = require_layouts(images[0][0], model)
    places = np.flatnonzero(np.asarray(rendered) == layouts.placeholder_id).tolist()
    if len(places) != len(images):
        kind = "sounds" if is_sound(images[0][0]) else "images"
        invalid(
            f"chat has {len(images)} {kind}, and {len(places)} placeholders of {kind} after it was rendered with the "
            "model's chat template; the numbers must be equal"
        )
    built.add_tokens("chat", rendered[: places[0]])
    for (name, data), (place, following) in zip(images, pairwise([*places, len(rendered)]), strict=True):
        await (built.add_sound if is_sound(name) else built.add_image)(name, data)
        built.add_tokens("chat", layouts.join_newlines(built.token_ids, rendered[place + 1 : following]))
    return built


def is_sound(name: str) -> bool:
    """True for the name of a sound, such as "chat.messages[0].parts[1].sound"."""
    return name.endswith(".sound")


def require_layouts(name: str, model: ServedModel) -> ImageLayouts:
    """How the model reads the image or the sound of this name. Raises UNIMPLEMENTED if it reads none."""
    kind, where, layouts, reason = "images", "", model.images, model.images_refusal
    if is_sound(name):
        kind, where, layouts, reason = "sounds", " in prompts", model.sounds, model.sounds_refusal
    if layouts is not None and model.encoder_cache_size:
        return layouts
    reason = reason if layouts is None else f"its workers encode no {kind}"
    refusal = f"{name}: this model reads no {kind}{where}" + (f": {reason}" if reason else "")
    raise RequestError(grpc.StatusCode.UNIMPLEMENTED, refusal)
