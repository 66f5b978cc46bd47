"""Renders chats outside of the front end, which starts this process and first sends the template (chat_renderer.py).

A template can be made to take hours and all memory, even at its compilation, when Jinja computes constants. So each
process compiles it itself, within the limits of its first chat.
"""

import marshal

from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve
from scheduler_service.frontend.text.chat_template import ChatTemplate
from scheduler_service.frontend.text.encoding_errors import REFUSED, TEXT, TOO_MANY, TemplateError, TooManyTokensError

MAX_KEPT = 64 << 20
"""Bytes of memory with which a process may continue; it starts with 21 MiB. A chat of 10 MB exceeds the limit."""
MAX_REASON = 64 << 10
"""Characters of a reason: more than the front end shows, because it still replaces marks by special tokens."""


def answer(template: ChatTemplate, message: bytes) -> bytes:
    """Answer a message of the front end: the messages of a chat, and the most characters of its text."""
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
