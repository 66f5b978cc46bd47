"""One HTTP request, with what its route needs to answer it."""

from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from pagewire_common.calls.request_limits import request_size
from scheduler_service.access.caller import caller
from scheduler_service.frontend.http.body import Part, parse, parsed_bytes, read_body
from scheduler_service.frontend.http.errors import HttpError
from scheduler_service.frontend.http.limits import MAX_SOUND_FORM_BYTES, Held
from scheduler_service.frontend.http.service import Metadata, Service
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.model import ServedModel

AnyFields = TypeVar("AnyFields", bound=Part)


@dataclass(slots=True)
class Call:
    """An HTTP request of a client whose key is known.

    `metadata`: the request's headers for traces. `held`: the memory that the request has reserved. `request_id`: the
    request's name in the log and in the answer; "" if the request has none.
    """

    request: web.Request
    service: Service
    metadata: Metadata
    held: Held
    receive_seconds: float
    texts: TokenTexts
    request_id: str = ""

    @property
    def most_bytes(self) -> int:
        """Largest size of a body in bytes: the limit of a gRPC request, which grows with the model's context."""
        return self.service.link.request_limits().num_bytes

    @property
    def most_sound_bytes(self) -> int:
        """Largest size in bytes of a body with an audio file."""
        return self.service.link.request_limits().num_opaque_bytes + MAX_SOUND_FORM_BYTES

    async def fields(self, kind: type[AnyFields]) -> AnyFields:
        """Read and validate the JSON body. The body's memory stays reserved until the call ends. Raises HttpError."""
        body = await read_body(self.request, self.held, self.most_bytes, self.receive_seconds)
        request_size.set(len(body))  # a body in chunks tells no length before
        self.held.take(parsed_bytes(body))
        return parse(body, kind)

    async def model(self) -> ServedModel:
        """The served model. Raises RequestError."""
        return await self.service.model()

    def adapter(self, asked: str, model: ServedModel) -> str:
        """The adapter that the field `model` names; "" for the served model itself. Raises HttpError and RequestError.

        A key learns only of the adapters that it may name: for any other name, the answer is the same.
        """
        if asked in ("", model.name):
            return ""
        names, key = self.service.link.adapter_names, caller.get()
        if key is not None:
            key.check_adapter(asked)
        if asked not in names:
            raise no_such_model(asked, [model.name, *(name for name in names if key is None or key.may_name(name))])
        return asked


def no_such_model(asked: str, names: list[str]) -> HttpError:
    """The error for a request that names an unknown model. `names`: the models and adapters of this server."""
    served = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return HttpError(404, "model_not_found", f"there is no model {asked[:64]!r}; this server has {served}", "model")
