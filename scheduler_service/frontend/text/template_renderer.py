"""The process that renders chats, with the chat template that the front end sends first (chat_renderer.py).

A malicious template can take hours and all memory even while Jinja compiles it, so it is compiled within the limits of
its first chat.
"""

import marshal

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.text.chat_template import ChatTemplate
from scheduler_service.frontend.text.encoding_errors import REFUSED, TEXT, TOO_MANY, TemplateError, TooManyTokensError

MAX_KEPT = 64 << 20
"""Resident bytes above which the process, which starts with 21 MiB, exits after the current chat."""
MAX_REASON = 64 << 10
"""Largest number of characters of an error message, before the front end replaces its marks and shortens it further."""


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """Render a chat. `message`: the chat's messages, and the largest number of characters of the rendered text."""
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
