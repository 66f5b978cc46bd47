"""Errors over HTTP, in the format of OpenAI's API."""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError

_Code = grpc.StatusCode
_STATUSES = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request"),
    _Code.ALREADY_EXISTS: (409, "already_exists"),
    _Code.UNAUTHENTICATED: (401, "invalid_api_key"),
    _Code.PERMISSION_DENIED: (403, "permission_denied"),
    _Code.NOT_FOUND: (404, "model_not_found"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_exceeded"),
    _Code.INTERNAL: (500, "internal_error"),
    _Code.UNKNOWN: (500, "internal_error"),
    _Code.UNIMPLEMENTED: (501, "not_implemented"),
}
_NAMES = {status: code.name for code, (status, _) in reversed(_STATUSES.items())} | {
    200: "OK",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    499: "CANCELLED",
    503: "UNAVAILABLE",
}
_NAMED = re.compile(r"(sampling\.|chat\.)(\w+)")
_PARTS = re.compile(r"^(chat\.messages\[\d+\])\.parts\b")
_IMAGE = re.compile(r"chat\.messages\[\d+\]\.parts\[\d+\]\.(?:image|sound)")
image_places: ContextVar[Mapping[str, str]] = ContextVar("image_places")
"""Names of images and sounds in the current request's body, by their names in its chat."""
_IN_JSON = {"template_arguments": "chat_template_kwargs"}
"""Fields that JSON bodies call otherwise."""
RETRY_SECONDS = 1
"""Seconds of the header Retry-After. Pauses of a fleet, such as the loss of a worker, last about a second."""
RETRY_AFTER = {"Retry-After": str(RETRY_SECONDS)}


class HttpError(Exception):
    """An error with an HTTP status, a code that programs can compare, and a message for the user.

    `parameter`: the name of the field that the error is about.
    """

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": parameter, "code": code}}

    def response(self, body: dict[str, Any] | None = None) -> web.Response:
        """The answer. `body`: the error in the format of another API than OpenAI's."""
        headers = RETRY_AFTER if self.status in (429, 503) else None
        return web.json_response(body or self.body, status=self.status, headers=headers)


def invalid(message: str, parameter: str | None = None) -> HttpError:
    """The error for an invalid request of the client."""
    return HttpError(400, "invalid_request", message, parameter)


def refused_by(error: RequestError) -> HttpError:
    """Convert an error of a call to an HTTP error."""
    status, code = _STATUSES.get(error.code, (503, "service_unavailable"))
    if image := _IMAGE.search(str(error)):
        place = image_places.get({}).get(image[0], image[0])
        return HttpError(status, code, str(error).replace(image[0], place), place.partition("[")[0])
    said = _PARTS.sub(r"\1.content", str(error))
    named = _NAMED.match(said)
    if named is None:
        return HttpError(status, code, said)
    given: str = named[2]
    name = _IN_JSON.get(given, given)  # JSON bodies have all fields at their top
    return HttpError(status, code, name + said[named.end() :], name)


def of_part(place: str, error: RequestError | HttpError, *names: str) -> HttpError:
    """The error of one of several parts of a request, with the part's place. An error about a field that the parts
    share stays as it is. `names`: fields that each part has of its own.
    """
    found = error if isinstance(error, HttpError) else refused_by(error)
    said = found.body["error"]
    if said["param"] not in (None, *names):
        return found
    return HttpError(found.status, said["code"], f"{place}: {said['message']}", said["param"])


def grpc_name(status: int) -> str:
    """The name of the gRPC status that is nearest to an HTTP status."""
    return _NAMES.get(status, "UNKNOWN")


def http_status(name: str) -> int:
    """The HTTP status of a call that ended with a gRPC status."""
    if name in ("OK", "CANCELLED"):
        return 200 if name == "OK" else 499
    return next((status for code, (status, _) in _STATUSES.items() if code.name == name), 503)


def failed(error: pb.OutputError) -> HttpError:
    """The error of an output that failed. `error.code` is the number of a gRPC status."""
    found = next((code for code in _Code if code.value[0] == error.code), _Code.INTERNAL)
    return refused_by(RequestError(found, error.message))
