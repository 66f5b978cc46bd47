"""The content of a message as the chat template reads it: a text, or a list of parts.

Some templates read only texts, some only lists, and some both. Two probes at the first chat tell which.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from scheduler_service.frontend.rendering.chat_input import Content
from scheduler_service.frontend.rendering.chat_marks import ChatMarks
from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.rendering.encoding_errors import TemplateError, TooManyTokensError

PROBE = "pagewireprobe"
MAX_PROBED = 100_000
"""Largest number of characters that a template may write for a probe."""

TemplateContent = str | list[dict[str, Any]]


class ContentForms(NamedTuple):
    reads_texts: bool = True
    reads_lists: bool = False


@cache
def content_forms(template: ChatTemplate) -> ContentForms:
    reads_lists = _shows(template, [{"type": "text", "text": PROBE}])
    return ContentForms(not reads_lists or _shows(template, PROBE), reads_lists)


class ContentReader:
    """Converts contents. `hide` replaces special tokens in a text by marks. For the others, see `ChatInput`.

    `parses_special_tokens`: special tokens that texts spell count as such.
    """

    def __init__(
        self, forms: ContentForms, marks: ChatMarks, placeholder: str, item_type: str, *, parses_special_tokens: bool
    ) -> None:
        self._forms, self._marks = forms, marks
        self._placeholder, self._item_type = placeholder, item_type
        self._hide: Callable[[str], str] = str if parses_special_tokens else marks.hide
        self._checks = not parses_special_tokens

    def read(self, place: str, content: Content) -> TemplateContent:
        """Raises TemplateError and TooManyTokensError."""
        if isinstance(content, str):
            text = self._hide(content)
            return text if self._forms.reads_texts else [_text(text)]
        parts = [part if part is None else self._hide(part) for part in content]
        if self._checks:
            self._check_borders(place, [part for part in parts if part is not None])
        if self._forms.reads_lists:
            return [{"type": self._item_type} if part is None else _text(part) for part in parts]
        return "\n".join(self._placeholder if part is None else part for part in parts)

    def _check_borders(self, place: str, texts: Sequence[str]) -> None:
        """A template may join the texts of a message, of which each has a piece of a special token."""
        if len(texts) > 1 and any(self._marks.spells_special(joint.join(texts)) for joint in ("", "\n")):
            raise TemplateError(f"{place}.parts spell a special token in several texts; send it in one text")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _shows(template: ChatTemplate, content: TemplateContent) -> bool:
    """Whether a template writes the text of a content, and not how Python or JSON would write a list."""
    values = {
        "messages": [{"role": "user", "content": content}],
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
    }
    try:
        text = template.render(values, MAX_PROBED)
    except (TemplateError, TooManyTokensError):
        return False
    is_shown = isinstance(content, list) and any(f"{quote}{PROBE}{quote}" in text for quote in "'\"")
    return PROBE in text and not is_shown
