"""The fields of the bodies whose answers are vectors or scores."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from scheduler_service.frontend.http.body import MAX_TEXTS, Fields, Number, Part, Priority, Texts
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.vectors.encodings import ByteOrder, NumberType
from scheduler_service.frontend.model import ServedModel

T = TypeVar("T")
Kept = Annotated[int, Field(ge=-1, lt=1 << 32)]
"""The number of last tokens of a text that are kept. As in vLLM, -1 means as many as the model reads."""
CohereForm = Literal["float", "binary", "ubinary", "base64"]
OneOrMore = str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]


class TextFields(Fields):
    """`truncate`: texts that are too long for the model are cut at their ends."""

    truncate: bool = False
    truncate_prompt_tokens: Kept | None = None
    priority: Priority = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""


class EmbeddingsFields(TextFields):
    """The fields of OpenAI, of vLLM and of pagewire's own protocol.

    `use_activation` is vLLM's name of `normalize`. With `bytes`, a header describes the body's bytes.
    """

    input: Texts
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: NumberType = "float32"
    endianness: ByteOrder = "native"
    dimensions: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[ -~]{1,200}$")] | None = None


class PoolingFields(EmbeddingsFields):
    """vLLM's fields. `token_embed`: a vector for each token."""

    task: Literal["embed", "token_embed"] = "embed"


class CohereFields(Fields):
    """The fields of the second version of Cohere's API, for texts. `binary`: a bit for the sign of each number."""

    texts: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
    embedding_types: Annotated[list[CohereForm], Field(fail_fast=True, min_length=1, max_length=4)] | None = None
    output_dimension: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    input_type: Annotated[str, Field(max_length=64)] | None = None
    priority: Priority = 0


class Document(Part):
    """A document as an object: only its text is supported."""

    text: str


class RerankFields(TextFields):
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, max_length=MAX_TEXTS)]
    top_n: Number | None = None
    return_documents: bool = True
    pair_format: str = ""


class ScoreFields(TextFields):
    """The two sides of pairs: `queries` and `documents`, whose other names are vLLM's. One query has many documents;
    as many queries as documents are pairs.
    """

    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    data_1: OneOrMore | None = None
    data_2: OneOrMore | None = None
    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    items: OneOrMore | None = None
    pair_format: str = ""

    def side(self, names: Sequence[str]) -> list[str]:
        """The texts of one side, which has one of several names. Raises HttpError unless exactly one name is used."""
        found = [given for name in names if (given := getattr(self, name)) is not None]
        if len(found) != 1:
            raise invalid(f"set one of {', '.join(names)}, and no other of them", names[0])
        return [found[0]] if isinstance(found[0], str) else found[0]


def kept_tokens(given: int | None, model: ServedModel) -> int | None:
    """The number of tokens at the end of each text that are kept; None for all."""
    return model.context_length if given == -1 else given
