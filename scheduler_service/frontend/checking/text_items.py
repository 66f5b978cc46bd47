"""Encodes the texts of a call as token ids, a few texts at a time."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.checking.checks import check_token_ids, invalid, require_tokenizer, take_token_ids
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.rendering.encoding_errors import TooManyTokensError
from scheduler_service.frontend.text.tokenization import Text, TextFit, TextItem

T = TypeVar("T")

TEXTS_AT_ONCE = 16
TOKENS_OF_CHARACTER = 4
TOKENS_AROUND = 8
CHARACTERS_AT_ONCE = 1 << 16
"""Largest number of characters of all texts that are encoded together."""


def longest_input(request: pb.EmbedRequest) -> int:
    return max(len(item.token_ids.ids) or most_tokens(len(item.text)) for item in request.inputs)


def most_tokens(num_characters: int) -> int:
    """An upper bound of a text's tokens, if the tokenizer's normalization expands no characters."""
    return TOKENS_OF_CHARACTER * num_characters + TOKENS_AROUND


async def encode_inputs(request: pb.EmbedRequest, model: ServedModel) -> AsyncIterator[TextItem]:
    fit = _read_fit(request, model)
    for some in _batches(enumerate(request.inputs), lambda numbered: len(numbered[1].text)):
        names = [f"inputs[{number}]" for number, item in some if item.HasField("text")]
        texts = [item.text for _, item in some if item.HasField("text")]
        encoded = iter(await _encode(texts, names, model, fit))
        for number, item in some:
            if item.HasField("text"):
                yield next(encoded)
            elif item.HasField("token_ids"):
                yield await _take(f"inputs[{number}].token_ids", item.token_ids.ids, model, fit)
            else:
                invalid(f"inputs[{number}] is missing: set one of text or token_ids")


async def encode_texts(
    named: Iterable[tuple[str, Text]], model: ServedModel, request: pb.ScoreRequest
) -> AsyncIterator[TextItem]:
    """Encode a request's texts in order. `named`: each text with its name for error messages. Raises RequestError."""
    fit = _read_fit(request, model)
    for some in _batches(named, lambda pair: _length(pair[1])):
        for item in await _encode([text for _, text in some], [name for name, _ in some], model, fit):
            yield item


def _read_fit(request: pb.EmbedRequest | pb.ScoreRequest, model: ServedModel) -> TextFit:
    if not request.HasField(name := "truncate_prompt_tokens"):
        return TextFit(model.context_length, request.truncate)
    num_kept = request.truncate_prompt_tokens
    if request.truncate:
        invalid(f"truncate is set with {name}; set one of the two")
    if not 1 <= num_kept <= model.context_length:
        invalid(
            f"{name} is {num_kept}; it must be at least 1 and at most {model.context_length}, which this model reads"
        )
    return TextFit(num_kept, cuts=True, keeps_end=True)


def _batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    num_characters = 0
    for item in items:
        if batch and (len(batch) == TEXTS_AT_ONCE or num_characters + size(item) > CHARACTERS_AT_ONCE):
            yield batch
            batch, num_characters = [], 0
        batch.append(item)
        num_characters += size(item)
    if batch:
        yield batch


def _length(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


async def _encode(texts: Sequence[Text], names: Sequence[str], model: ServedModel, fit: TextFit) -> list[TextItem]:
    if not texts:
        return []
    tokenizer = require_tokenizer("text", model)
    try:
        encoded = await tokenizer.encode_texts(texts, fit)
    except TooManyTokensError as error:
        # Truncation cuts only the second text of a pair.
        reads = "are kept" if fit.keeps_end else "this model reads"
        advice = "the query alone is too long, and is not cut: shorten it" if fit.cuts else "set truncate to cut it"
        if fit.cuts and isinstance(texts[error.args[0]], str):
            advice = "special tokens alone are too many, and are not cut"
        invalid(f"{names[error.args[0]]} has more tokens than the {fit.most} that {reads}; {advice}")
    for name, item in zip(names, encoded, strict=True):
        _check(name, item.token_ids, item.largest_id, model)
    return encoded


async def _take(name: str, ids: Sequence[int], model: ServedModel, fit: TextFit) -> TextItem:
    if len(ids) > fit.most and not fit.cuts:
        invalid(f"{name} has {len(ids)} tokens; this model reads {fit.most} at most; set truncate to cut it")
    token_ids = await take_token_ids(ids[-fit.most :] if fit.keeps_end else ids[: fit.most])
    largest = max(token_ids, default=0)
    _check(name, token_ids, largest, model)
    return TextItem(token_ids, largest)


def _check(name: str, token_ids: Sequence[int], largest: int, model: ServedModel) -> None:
    if not token_ids:
        invalid(f"{name} is empty; at least one token is needed")
    check_token_ids(name, (largest,), model)
