"""The field `encrypted_content` of reasoning items, which clients that store nothing send back with the next request.

It is the reasoning's text in an opaque form of any server of this kind. It is not encrypted, and not signed: the same
item shows the text, and a client may send any reasoning as `content`.
"""

import base64

from scheduler_service.frontend.http.errors import invalid

_PREFIX = "pagewire-1."


def encode_reasoning(text: str) -> str:
    return _PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(given: str, place: str) -> str:
    """The text of a reasoning item. Raises HttpError for a text of another origin, such as OpenAI's own."""
    try:
        if given.startswith(_PREFIX):
            return base64.b64decode(given.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:  # also an error of base64 or of UTF-8
        pass
    raise invalid(f"{place}.encrypted_content does not come from this server; send the item's content instead", "input")
