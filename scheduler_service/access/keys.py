"""Parses a key file, with the API keys of callers.

The file contains only digests of keys, so a leaked file permits no calls.

    [[key]]
    id = "alice-laptop"             # shown in logs
    sha256 = "9f86d081884c7d65…"    # digest of the key; `pagewire new-key` creates key and digest
    tenant = "alice"                # owns the key's requests, cached prompts and fair share
    requests_per_minute = 600       # this and the following lines are optional
    tokens_per_minute = 100000      # tokens of prompts and outputs
    concurrency = 16                # requests in flight
    models = ["default"]            # models that the key may use; by default all
    adapters = ["poet"]             # adapters that the key may name; by default all
    weight = 2.0                    # the tenant's share under the fair policy; equal for all keys of a tenant
    admin = false                   # whether the key may call AdminService
    metrics = false                 # whether the key may read metrics
    prompt_embeds = false           # whether the key may send prompt_embeds

One round of SHA-256 is enough for the digest, because a key of 32 random bytes cannot be guessed.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError

MAX_NAME = 64
MAX_BYTES = 4 << 20
"""Largest bytes of a key file: the engine sends all keys to a front end in one message."""
_SCHEME = "bearer "
_START = 8

_Name = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[\w.@:-]*$")]
_PerMinute = Annotated[int, Field(ge=1, lt=1 << 63)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[_Name, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: _Name
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] = 1.0
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    concurrency: _PerMinute | None = None
    models: list[str] | None = None
    adapters: list[str] | None = None
    admin: bool = False
    metrics: bool = False
    prompt_embeds: bool = False


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: list[_Entry] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The permissions and limits of one API key. None means no limit."""

    id: str
    digest: bytes
    tenant: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    admin: bool = False
    metrics: bool = False
    prompt_embeds: bool = False

    def check_model(self, name: str) -> None:
        if self.models is not None and name not in self.models:
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, f"this API key may not use the model {name!r}")

    def check_adapter(self, name: str) -> None:
        """Raises PERMISSION_DENIED if the key may not name the adapter, whether or not the adapter exists."""
        if name and not self.may_name(name):
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, f"this API key may not use the adapter {name!r}")

    def may_name(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Keyring:
    """All API keys. Raises ValueError for two equal ids, or for different weights of one tenant's keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.by_id: dict[str, ApiKey] = {}
        self._by_start: dict[bytes, ApiKey] = {}
        self.weights: dict[str, float] = {}
        for key in keys:
            if key.id in self.by_id:
                raise ValueError(f"two keys have the id {key.id!r}")
            if key.digest[:_START] in self._by_start:
                raise ValueError(f"the key {key.id!r} is there twice, or its digest begins like another's")
            if self.weights.setdefault(key.tenant, key.weight) != key.weight:
                raise ValueError(f"keys of the tenant {key.tenant!r} have different weights")
            self.by_id[key.id] = self._by_start[key.digest[:_START]] = key

    def find(self, presented: str) -> ApiKey | None:
        """The key that a caller presents; None if it is unknown. The run time reveals nothing about existing keys.

        Callers cannot choose the digest whose first bytes select a key; whole digests are compared in constant time.
        """
        digest = digest_of(presented)
        key = self._by_start.get(digest[:_START])
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def opens_metrics(self, authorization: str) -> bool:
        try:
            key = self.authenticate([("authorization", authorization)])
        except RequestError:
            return False
        return key.metrics or key.admin

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> ApiKey:
        """Find the API key in the header `authorization`. Raises UNAUTHENTICATED."""
        values = [value for name, value in metadata or () if name == "authorization"]
        if not values:
            raise _unauthenticated(_NO_KEY)
        if len(values) > 1 or not isinstance(values[0], str) or values[0][: len(_SCHEME)].lower() != _SCHEME:
            raise _unauthenticated("authorization must be given once, as Bearer KEY")
        if (key := self.find(values[0][len(_SCHEME) :].strip())) is None:
            raise _unauthenticated("the API key is not known")
        return key

    def encode(self) -> pb.Keys:
        """Encode what front ends need to know of all keys."""
        return pb.Keys(
            keys=[
                pb.Key(
                    id=key.id,
                    digest=key.digest,
                    tenant=key.tenant,
                    models=None if key.models is None else pb.Names(names=sorted(key.models)),
                    adapters=None if key.adapters is None else pb.Names(names=sorted(key.adapters)),
                    requests_per_minute=key.requests_per_minute,
                    prompt_embeds=key.prompt_embeds,
                )
                for key in self.by_id.values()
            ]
        )

    @classmethod
    def decode(cls, keys: pb.Keys) -> "Keyring":
        return cls(
            ApiKey(
                id=key.id,
                digest=key.digest,
                tenant=key.tenant,
                models=frozenset(key.models.names) if key.HasField("models") else None,
                adapters=frozenset(key.adapters.names) if key.HasField("adapters") else None,
                requests_per_minute=key.requests_per_minute if key.HasField("requests_per_minute") else None,
                prompt_embeds=key.prompt_embeds,
            )
            for key in keys.keys
        )


_NO_KEY = (
    "an API key is needed: pagewire's commands take it from the environment, as PAGEWIRE_CLIENT_API_KEY; other clients "
    "send authorization: Bearer KEY"
)


def _unauthenticated(reason: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNAUTHENTICATED, reason)


ENVIRONMENT_KEY = "environment"
"""The id of the key in the environment variable."""


def read_keys(file: Path | None, plain: str | None) -> Keyring:
    """Read a key file, and add the key `plain` with all permissions. Raises ValueError for an invalid file or key."""
    if file is not None and (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"the file has {size} bytes; at most {MAX_BYTES} are read")
    keys = [] if file is None else parse_keys(file.read_text())
    if plain is not None:
        if not plain.strip():
            raise ValueError("the key that the environment gives is empty")
        digest = digest_of(plain.strip())
        keys.append(ApiKey(id=ENVIRONMENT_KEY, digest=digest, tenant="", admin=True, metrics=True, prompt_embeds=True))
    return Keyring(keys)


def parse_keys(text: str) -> list[ApiKey]:
    """Raises ValueError, whose message names the place of the error in the file."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).key
        if entries is None:  # for example because the file is still being written
            raise ValueError("it has no [[key]]; to allow no key at all, write key = []")
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise ValueError(f"{place.lstrip('.')}: {first['msg']}") from None
    return [_key(entry.model_dump()) for entry in entries]


def _key(entry: Mapping[str, Any]) -> ApiKey:
    fields = dict(entry)
    for name in ("models", "adapters"):
        fields[name] = None if fields[name] is None else frozenset(fields[name])
    return ApiKey(digest=bytes.fromhex(fields.pop("sha256")), **fields)
