"""The process that renders chats.

The front end starts this process and first sends the chat template (chat_renderer.py).

A malicious template can take hours and all memory even while Jinja compiles it, because the compiler computes constant
expressions. For this reason, a rendering process compiles the template together with its first chat, within the limits
of this chat.
"""

import marshal

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.text.chat_template import ChatTemplate
from scheduler_service.frontend.text.encoding_errors import REFUSED, TEXT, TOO_MANY, TemplateError, TooManyTokensError

MAX_KEPT = 64 << 20
"""Bytes of resident memory of the rendering process, which starts with 21 MiB. If the process exceeds `MAX_KEPT`, for
example by a chat of 10 MB, it exits after the current chat.
"""
MAX_REASON = 64 << 10
"""Largest number of characters of an error message to the front end. The front end first replaces marks in the message
by their special tokens, and then shortens the message further.
"""


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """Render a chat.

    `message` contains the chat's messages and the largest number of characters of the rendered text.
    """
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
