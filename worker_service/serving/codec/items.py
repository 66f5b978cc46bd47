"""Decodes the items of a new sequence's prompt, and checks them against the worker's limits."""

from collections.abc import Iterable

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_common.prompt_embeds import read_embeddings_header
from worker_service.errors import InvalidStepError
from worker_service.session.items import Embeddings, EncoderItem, ImagePart, PromptItem
from worker_service.session.step import Limits


def decode_items(where: str, message: pb.NewSequence, limits: Limits) -> tuple[PromptItem, ...]:
    """Raises InvalidStepError."""
    items, end, shift = [], 0, 0
    for item in message.items:
        place, stop = f"{where}: item at token {item.start}", item.start + item.num_embeddings
        is_image = item.HasField("image")
        if not is_image and not limits.prompt_embeds_size:
            raise InvalidStepError(f"{place}: this worker's model reads no embeddings")
        if not end <= item.start < stop <= message.num_prompt_tokens:
            most = message.num_prompt_tokens
            raise InvalidStepError(f"{place}: it ends at token {stop}, between token {end} and the prompt's {most}")
        end = stop
        if is_image:
            image = _image(place, item, message, limits)
            shift += image.shift
            items.append(PromptItem(item.digest, item.start, stop, image=image, shift=shift))
        else:
            items.append(PromptItem(item.digest, item.start, stop, _embeddings(place, item, limits), shift=shift))
    return tuple(items)


def decode_encoder_items(items: Iterable[pb.EncoderItem]) -> tuple[EncoderItem, ...]:
    return tuple(EncoderItem(item.digest, item.part) for item in items)


def _embeddings(place: str, item: pb.PromptItem, limits: Limits) -> Embeddings | None:
    if not item.data:
        return None
    data = item.data
    try:
        header = read_embeddings_header(data)
    except ValueError as error:
        raise InvalidStepError(f"{place}: its data {error}") from None
    if (found := (header.num_embeddings, header.size)) != (wanted := (item.num_embeddings, limits.prompt_embeds_size)):
        raise InvalidStepError(f"{place}: its tensor has the shape {found} instead of {wanted}")
    return Embeddings(header.dtype, header.num_embeddings, memoryview(data)[header.begin :])


def _image(place: str, item: pb.PromptItem, message: pb.NewSequence, limits: Limits) -> ImagePart:
    """The image's tokens must be those that the model's processor writes."""
    if limits.images is None:
        raise InvalidStepError(f"{place}: this worker reads no images")
    image, stop = item.image, item.start + item.num_embeddings
    if not (image.width and image.height):
        raise InvalidStepError(f"{place}: an image of {image.width} x {image.height} pixels")
    try:
        layout = limits.images.of_part(image.part, image.width, image.height)
    except ValueError as error:
        raise InvalidStepError(f"{place}: an image of {image.width} x {image.height} pixels: {error}") from None
    number = image.part - layout.first_part
    if number >= len(layout.parts):
        raise InvalidStepError(f"{place}: part {image.part} of an image with {len(layout.parts)} parts")
    part = layout.parts[number]
    if tuple(message.token_ids[item.start : stop]) != layout.token_ids[part.start : part.stop]:
        raise InvalidStepError(f"{place}: its tokens are not those of part {image.part} of the image")
    return ImagePart(image.part, image.width, image.height, layout.grid, item.data)
