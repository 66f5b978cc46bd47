"""The key that the call under way was made with."""

from collections.abc import Callable
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError
from pagewire_common.serving.lock import Check
from scheduler_service.access.keys import ApiKey, Keyring

caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)
"""None where no keys are wanted."""


def key_check(keyring: Callable[[], Keyring | None], *, admin: bool = False) -> Check:
    """A check of calls against the keys of the moment, None for none; with `admin`, by keys that may administer."""

    def check(details: grpc.HandlerCallDetails) -> None:
        if (keys := keyring()) is None:
            return
        key = keys.authenticate(details.invocation_metadata)
        caller.set(key)
        if admin and not key.admin:
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "this API key may not administer")

    return check


def tenant_of(asked: str) -> str:
    """The tenant of the call under way: its key's, or where no keys are wanted the one it asks for.

    Raises PERMISSION_DENIED for another tenant than the key's.
    """
    if (key := caller.get()) is None:
        return asked
    if asked not in ("", key.tenant):
        raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "tenant is not the one of this API key; leave it empty")
    return key.tenant
