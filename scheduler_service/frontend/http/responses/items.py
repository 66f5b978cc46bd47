"""Input items: each type of item with the fields that it may have. Files and hosted tools are refused."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from scheduler_service.frontend.http.body import Part, parse_part
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.images.image_reader import ContentPart, ImageReader, ImageSource, joined_parts
from scheduler_service.frontend.http.responses.fields import Id
from scheduler_service.frontend.http.responses.reasoning_content import decode_reasoning

Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class TextPart(Part):
    """`annotations` and `logprobs` come from an earlier answer, and say nothing to the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


class ImagePart(Part):
    """An image. `detail` has no effect: the size that the model's files state is read."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ReasoningPart(Part):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class Item(Part):
    """The fields of all items that have no effect: ids may have any form."""

    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class Message(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: Literal["commentary", "final_answer"] | None = None

    def parts(self, place: str, images: ImageReader) -> list[ContentPart]:
        """Raises HttpError."""
        return read_content(self.content, f"{place}.content", images if self.role == "user" else ImageReader())


class Reasoning(Item):
    """The reasoning of an earlier answer: the reasoning itself, as `content` or encoded, or else a summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None

    def text(self, place: str) -> str:
        """Raises HttpError."""
        encoded = self.encrypted_content and decode_reasoning(self.encrypted_content, place)
        if encoded and not self.content:
            return encoded
        return "\n".join(part.text for part in self.content or self.summary)


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(max_length=128)]
    arguments: str | dict[str, Any] = ""


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Id
    name: Annotated[str, Field(max_length=128)] | None = None
    output: str | Parts

    def parts(self, place: str, images: ImageReader) -> list[ContentPart]:
        """Raises HttpError."""
        return read_content(self.output, f"{place}.output", images)


class ItemReference(Part):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


AnyItem = Message | Reasoning | FunctionCall | FunctionCallOutput | ItemReference
_KINDS: dict[str, type[AnyItem]] = {
    "message": Message,
    "reasoning": Reasoning,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "item_reference": ItemReference,
}


def read_item(given: dict[str, Any], place: str) -> AnyItem:
    """Validate an item. An item without a type is a message. Raises HttpError."""
    kind = given.get("type") or ("item_reference" if given.keys() == {"id"} else "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise invalid(f"{place}.type is {_shown(kind)}; it must be one of {', '.join(_KINDS)}", "input")
    return parse_part(given, _KINDS[kind], place)


def read_content(content: str | list[dict[str, Any]], place: str, images: ImageReader) -> list[ContentPart]:
    """The texts and images of a content. Different texts are different paragraphs for the model. Raises HttpError."""
    return joined_parts([content] if isinstance(content, str) else _parts(content, place, images))


def _parts(parts: list[dict[str, Any]], place: str, images: ImageReader) -> Iterator[ContentPart]:
    for number, part in enumerate(parts):
        where = f"{place}[{number}]"
        match part.get("type"):
            case "input_text" | "output_text":
                yield parse_part(part, TextPart, where).text
            case "refusal":
                yield parse_part(part, RefusalPart, where).refusal
            case "input_image" if images.is_possible:
                yield ImageSource(f"{where}.image_url", url=parse_part(part, ImagePart, where).image_url)
            case kind:
                raise _unknown(where, kind, images)


def _unknown(place: str, kind: Any, images: ImageReader) -> HttpError:
    known = (
        "input_text, output_text, refusal or input_image"
        if images.is_possible
        else "input_text, output_text or refusal"
    )
    return invalid(f"{place}.type is {_shown(kind)}, and this model reads {images.reads}; it must be {known}", "input")


def _shown(kind: Any) -> str:
    return repr(kind[:64]) if isinstance(kind, str) else "missing" if kind is None else "no text"
