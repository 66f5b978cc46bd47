"""Errors over HTTP, in the format of OpenAI's API."""

from typing import Any

import grpc
from aiohttp import web

_Code = grpc.StatusCode
_STATUSES = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request"),
    _Code.UNAUTHENTICATED: (401, "invalid_api_key"),
    _Code.PERMISSION_DENIED: (403, "permission_denied"),
    _Code.NOT_FOUND: (404, "model_not_found"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_exceeded"),
    _Code.INTERNAL: (500, "internal_error"),
    _Code.UNKNOWN: (500, "internal_error"),
    _Code.UNIMPLEMENTED: (501, "not_implemented"),
}


class HttpError(Exception):
    """An error with an HTTP status, a code that programs can compare, and a message for the user."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self._status = status
        kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def response(self) -> web.Response:
        return web.json_response(self.body, status=self._status)


def invalid(message: str) -> HttpError:
    """The error for an invalid request of the client."""
    return HttpError(400, "invalid_request", message)


def refused_by(error: grpc.aio.AioRpcError) -> HttpError:
    """Convert the scheduler's error to an HTTP error."""
    status, code = _STATUSES.get(error.code(), (503, "service_unavailable"))
    return HttpError(status, code, sentence_of(error))


def sentence_of(error: grpc.aio.AioRpcError) -> str:
    """The error's message. If the scheduler cannot be reached, the message hides the scheduler's address."""
    if error.code() not in _STATUSES:
        return "the scheduler cannot be reached, or takes no requests now"
    return error.details() or ""
