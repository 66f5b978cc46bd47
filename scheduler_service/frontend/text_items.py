"""The texts of a call as token ids, encoded a few at a time. Every error names the text and the limit."""

from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.checks import check_token_ids, invalid, require_tokenizer, take_token_ids
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.tokenization import TooManyTokensError

ENCODED_AT_ONCE = 16

Text = str | tuple[str, str]
"""A text, or a pair."""


@dataclass(frozen=True, slots=True)
class TextItem:
    """Of a pair the first text has `num_first_tokens`, 0 where the model does not tell the two apart."""

    token_ids: "array[int]"
    num_first_tokens: int = 0


async def encode_inputs(request: pb.EmbedRequest, model: ServedModel) -> AsyncIterator[TextItem]:
    """The inputs in order. Raises RequestError."""
    inputs = iter(enumerate(request.inputs))
    while some := list(islice(inputs, ENCODED_AT_ONCE)):
        names = [f"inputs[{number}]" for number, item in some if item.HasField("text")]
        texts = [item.text for _, item in some if item.HasField("text")]
        encoded = iter(await _encode(texts, names, model, request.truncate))
        for number, item in some:
            if item.HasField("text"):
                yield next(encoded)
            elif item.HasField("token_ids"):
                yield await _take(f"inputs[{number}].token_ids", item.token_ids.ids, model, request.truncate)
            else:
                invalid(f"inputs[{number}] is missing: set one of text or token_ids")


async def encode_texts(
    named: Iterable[tuple[str, Text]], model: ServedModel, *, truncate: bool
) -> AsyncIterator[TextItem]:
    """Texts in order, each with a name for errors. Raises RequestError."""
    remaining = iter(named)
    while some := list(islice(remaining, ENCODED_AT_ONCE)):
        for item in await _encode([text for _, text in some], [name for name, _ in some], model, truncate):
            yield item


async def _encode(texts: Sequence[Text], names: Sequence[str], model: ServedModel, truncate: bool) -> list[TextItem]:
    if not texts:
        return []
    tokenizer, most = require_tokenizer("text", model), model.context_length
    try:
        encoded = await tokenizer.encode_texts(texts, most=most, truncate=truncate)
    except TooManyTokensError as error:
        invalid(f"{names[error.args[0]]} has more tokens than the {most} that this model reads; set truncate to cut it")
    for name, (token_ids, _) in zip(names, encoded, strict=True):
        _check(name, token_ids, model)
    return [TextItem(array("I", token_ids), num_first_tokens) for token_ids, num_first_tokens in encoded]


async def _take(name: str, ids: Sequence[int], model: ServedModel, truncate: bool) -> TextItem:
    most = model.context_length
    if len(ids) > most and not truncate:
        invalid(f"{name} has {len(ids)} tokens; this model reads {most} at most; set truncate to cut it")
    token_ids = await take_token_ids(ids[:most])
    _check(name, token_ids, model)
    return TextItem(token_ids)


def _check(name: str, token_ids: Sequence[int], model: ServedModel) -> None:
    if not token_ids:
        invalid(f"{name} is empty; at least one token is needed")
    check_token_ids(name, token_ids, model)
