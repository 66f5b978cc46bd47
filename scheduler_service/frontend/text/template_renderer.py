"""Renders chats outside of the front end, which starts it and sends the template first (chat_renderer.py).

A template can be made to take hours and all memory, at its compilation already, where Jinja computes constants. So each
process compiles it for itself, within the limits of its first chat.
"""

import marshal

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.text.chat_template import ChatTemplate
from scheduler_service.frontend.text.encoding_errors import REFUSED, TEXT, TOO_MANY, TemplateError, TooManyTokensError

MAX_KEPT = 64 << 20
"""Bytes of memory that a process may go on with, of which it has 21 MiB at its start. A chat of 10 MB exceeds it."""
MAX_REASON = 64 << 10
"""Characters: more than the front end shows, which has yet to spell out special tokens in it."""


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """Answer a message of the front end: the messages of a chat, and the characters that its text may have."""
    messages, most = marshal.loads(message)  # noqa: S302  # the front end has made it
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
    source, variables = marshal.loads(connection.recv_bytes())  # noqa: S302  # the front end has made it
    template = ChatTemplate(source, variables)
    serve(connection, lambda message: answer(template, message), MAX_KEPT)


if __name__ == "__main__":
    main()
