"""One HTTP request, with what its route needs to answer it."""

import asyncio
from collections.abc import Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from aiohttp import web

from pagewire_common.calls.request_limits import request_size
from scheduler_service.access.caller import caller, tenant_of
from scheduler_service.frontend.http.body import Part, check_simple, parse, parse_names, parsed_bytes, read_body
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.images.image_reader import ImageReader
from scheduler_service.frontend.http.limits import MAX_ITEM_BYTES, MAX_SOUND_FORM_BYTES, Held
from scheduler_service.frontend.http.resuming.event_ids import FIRST, HEADER, EventIds
from scheduler_service.frontend.http.resuming.event_stream import EventStream
from scheduler_service.frontend.http.service import Metadata, Service
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.model import ServedModel

AnyFields = TypeVar("AnyFields", bound=Part)
HASHED_AT_ONCE = 1 << 20
"""Bytes of a body that are hashed in one turn of the event loop, in about 1 ms."""


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
    body: bytes = b""
    body_digest: bytes = b""
    num_body_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """Largest size of a body in bytes: the limit of a gRPC request, which grows with the model's context."""
        return self.service.link.request_limits().num_bytes

    @property
    def most_sound_bytes(self) -> int:
        """Largest size in bytes of a body with an audio file."""
        return self.service.link.request_limits().num_opaque_bytes + MAX_SOUND_FORM_BYTES

    async def fields(
        self, kind: type[AnyFields], *, takes_embeds: bool = False, takes_images: bool = False
    ) -> AnyFields:
        """Read and validate the JSON body. The body's memory stays reserved until the call ends. Raises HttpError.

        `takes_embeds`, `takes_images`: the body may also have prompt_embeds, or images and sounds in base64, if the
        model reads them. Parsing them takes up to 8 ms.
        """
        model = self.service.link.loading.model
        is_long = model is not None and (
            (takes_embeds and model.prompt_embeds_size > 0)
            or (takes_images and (model.reads_images or model.reads_sounds))
        )
        body = await self._read(self.most_bytes + (MAX_ITEM_BYTES * 4 // 3 if is_long else 0))
        self.num_body_bytes = len(body)
        is_large = len(body) > self.most_bytes
        self.held.take(await check_simple(body, self.most_bytes) if is_large else parsed_bytes(body))
        hashed = blake2b()
        for start in range(0, len(body), HASHED_AT_ONCE):
            hashed.update(body[start : start + HASHED_AT_ONCE])
            if len(body) > HASHED_AT_ONCE:
                await asyncio.sleep(0)
        self.body_digest = hashed.digest()
        return parse(body, kind)

    async def field_names(self) -> Set[str]:
        """The names in the JSON body, which `fields` can read afterwards. Raises HttpError."""
        self.body = await self._read(self.most_bytes)
        self.held.take(parsed_bytes(self.body))
        return parse_names(self.body)

    async def _read(self, most_bytes: int) -> bytes:
        if not self.body:
            self.body = await read_body(self.request, self.held, most_bytes, self.receive_seconds)
            request_size.set(len(self.body))  # a body in chunks tells no length before
        body, self.body = self.body, b""
        return body

    def events(
        self, model: ServedModel, *, is_streamed: bool, num_outputs: int = 1, has_ids: bool = False
    ) -> EventStream:
        """The events of the answer. `has_ids`: they have ids without being asked for. Raises HttpError."""
        last_id = self.request.headers.get(HEADER, "")
        if not is_streamed:
            if last_id:
                raise invalid(f"{HEADER} is for streams; set stream: true", HEADER)
            return EventStream(self.request, num_outputs)
        if not last_id and not has_ids:
            return EventStream(self.request, num_outputs)
        names = (self.request.rel_url.raw_path, tenant_of(""), model.fingerprint)
        repeated = blake2b("\0".join(names).encode() + self.body_digest, digest_size=16).digest()
        ids = EventIds(self.service.link.welcome.result().resume_secret, repeated)
        if last_id in ("", FIRST):
            return EventStream(self.request, num_outputs, ids)
        return EventStream(self.request, num_outputs, ids, *ids.read(last_id, num_outputs))

    def images(self, model: ServedModel) -> ImageReader:
        held, num_bytes = self.held, self.num_body_bytes
        return ImageReader(
            model.reads_images, model.reads, self.service.media, held, num_bytes, self.most_bytes, model.reads_sounds
        )

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
