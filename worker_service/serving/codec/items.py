"""Decodes the items of a new sequence's prompt, and checks them against the worker's limits."""

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_common.prompt_embeds import read_embeddings_header
from worker_service.errors import InvalidStepError
from worker_service.session.step import Embeddings, Limits, PromptItem


def decode_items(where: str, message: pb.NewSequence, limits: Limits) -> tuple[PromptItem, ...]:
    """Raises InvalidStepError."""
    items, end = [], 0
    for item in message.items:
        place, stop = f"{where}: item at token {item.start}", item.start + item.num_embeddings
        if not limits.prompt_embeds_size:
            raise InvalidStepError(f"{place}: this worker's model reads no embeddings")
        if not end <= item.start < stop <= message.num_prompt_tokens:
            most = message.num_prompt_tokens
            raise InvalidStepError(f"{place}: it ends at token {stop}, between token {end} and the prompt's {most}")
        end = stop
        items.append(PromptItem(item.digest, item.start, stop, _embeddings(place, item, limits)))
    return tuple(items)


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
