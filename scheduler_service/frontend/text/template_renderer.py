"""The process that renders chats. The front end starts the process and first sends the template (chat_renderer.py).

A hostile template can take hours and all memory, even when Jinja compiles the template and computes constants. So each
process compiles the template within the limits of the first chat.
"""

import marshal

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.text.chat_template import ChatTemplate
from scheduler_service.frontend.text.encoding_errors import REFUSED, TEXT, TOO_MANY, TemplateError, TooManyTokensError

MAX_KEPT = 64 << 20
"""Bytes of memory. A process that exceeds this limit ends after its chat. A process starts with 21 MiB; a chat of 10 MB
exceeds the limit.
"""
MAX_REASON = 64 << 10
"""Largest number of characters of an error message that is sent to the front end. The front end replaces marks by
special tokens and then shortens the message.
"""


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """Render a chat. The front end sends the chat's messages and the largest number of characters of the text."""
    messages, most = marshal.loads(message)  # noqa: S302  # bytes from the front end are trusted
    try:
        return TEXT + template.render(messages, most).encode()
    except TooManyTokensError:
        return TOO_MANY
    except TemplateError as error:
        return REFUSED + str(error)[:MAX_REASON].encode(errors="replace")
    except UnicodeEncodeError:
        return REFUSED + b"the model's chat template writes one half of a surrogate pair, which is no character"


def main() -> None:
    connection = connect_to_the_front_end()
    source, variables = marshal.loads(connection.recv_bytes())  # noqa: S302  # bytes from the front end are trusted
    template = ChatTemplate(source, variables)
    serve(connection, lambda message: answer(template, message), MAX_KEPT)


if __name__ == "__main__":
    main()
