"""The API key of the current call."""

from collections.abc import Callable
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import Check, RequestError
from scheduler_service.access.keys import ApiKey, Keyring

caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)
"""None if calls need no key."""


def admin_check(keyring: Callable[[], Keyring | None]) -> Check:
    """A check that each call has an administrator's API key. If `keyring` returns None, calls need no key."""

    def check(details: grpc.HandlerCallDetails) -> None:
        if (keys := keyring()) is None:
            return
        key = keys.authenticate(details.invocation_metadata)
        caller.set(key)
        if not key.admin:
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "this API key may not administer")

    return check


def tenant_of(asked: str) -> str:
    """The API key's tenant or, without a key, the requested one. Raises PERMISSION_DENIED if the two differ."""
    if (key := caller.get()) is None:
        return asked
    if asked not in ("", key.tenant):
        raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "tenant is not the one of this API key; leave it empty")
    return key.tenant
