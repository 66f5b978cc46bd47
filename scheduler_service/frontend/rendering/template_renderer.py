"""The process that renders chats.

The front end starts this process and first sends the chat template (chat_renderer.py).

A malicious template can take hours and all memory even while Jinja compiles it, because the compiler computes constant
expressions. For this reason, a rendering process compiles the template together with its first chat, within the limits
of this chat.
"""

import marshal
from urllib.parse import quote

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.rendering.chat_input import RawChat
from scheduler_service.frontend.rendering.chat_marks import ChatMarks, SpecialTokens, changed_marks
from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.rendering.chat_values import cut_at_the_end, read_chat
from scheduler_service.frontend.rendering.encoding_errors import (
    MARKED,
    REFUSED,
    TEXT,
    TOO_MANY,
    TemplateError,
    TooManyTokensError,
)

MAX_KEPT = 64 << 20
"""Bytes of resident memory of the rendering process, which starts with 21 MiB. If the process exceeds `MAX_KEPT`, for
example by a chat of 10 MB, it exits after the current chat.
"""
MAX_REASON = 1000
"""Largest number of characters of an error message."""
MAX_TRIES = 4
"""Largest number of times that the characters of marks are chosen, if a text has the characters of the choice before.
"""


def answer(template: ChatTemplate, special: SpecialTokens, message: bytes) -> bytes:
    """Render a chat.

    `message` contains the chat, the largest number of tokens, and the largest number of characters of a token.
    """
    chat, most, longest = marshal.loads(message)  # noqa: S302  # bytes from the front end are trusted
    marks = ChatMarks(special, template.source, most)
    try:
        for _ in range(MAX_TRIES):
            if rendered := _render(chat, template, marks, most * longest):
                return rendered
            marks = ChatMarks(special, template.source, most)
        return REFUSED + b"the chat spells out special tokens among thousands of rare ideographs"
    except TooManyTokensError:
        return TOO_MANY
    except TemplateError as error:
        reason = marks.show(str(error))
        reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"
        return REFUSED + reason.encode(errors="replace")
    except UnicodeEncodeError:
        return REFUSED + b"the model's chat template writes one half of a surrogate pair, which is no character"


def _render(chat: RawChat, template: ChatTemplate, marks: ChatMarks, most: int) -> bytes:
    """Render a chat with marks. The result is empty if the marks are ambiguous."""
    *_, continues, _, _, _ = chat
    values = read_chat(chat, template, marks)
    is_marked = marks.num_found > 0
    if marks.clashes and (is_marked or continues):
        return b""
    text = template.render(values, most, plain=marks.begin + marks.end)
    if continues:
        text = cut_at_the_end(text, marks)
    if is_marked and quote(marks.begin) in text:
        raise changed_marks()
    return MARKED + f"{marks.begin}{marks.end}{text}".encode() if is_marked else TEXT + text.encode()


def main() -> None:
    connection = connect_to_the_front_end()
    source, variables, words = marshal.loads(connection.recv_bytes())  # noqa: S302  # bytes from the front end are trusted
    template, special = ChatTemplate(source, variables), SpecialTokens(words)
    serve(connection, lambda message: answer(template, special, message), MAX_KEPT)


if __name__ == "__main__":
    main()
