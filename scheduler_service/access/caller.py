"""The API key of the current call."""

from collections.abc import Callable
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError
from pagewire_common.serving.lock import Check
from scheduler_service.access.keys import ApiKey, Keyring

caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)
"""The current call's key; None if calls need no key."""


def key_check(keyring: Callable[[], Keyring | None], *, admin: bool = False) -> Check:
    """A check of calls against the current keys, or None if there are none; with `admin`, against administrators'
    keys.
    """

    def check(details: grpc.HandlerCallDetails) -> None:
        if (keys := keyring()) is None:
            return
        key = keys.authenticate(details.invocation_metadata)
        caller.set(key)
        if admin and not key.admin:
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "this API key may not administer")

    return check


def tenant_of(asked: str) -> str:
    """The current call's tenant: its key's, or if calls need no key the requested one.

    Raises PERMISSION_DENIED for a tenant other than the key's.
    """
    if (key := caller.get()) is None:
        return asked
    if asked not in ("", key.tenant):
        raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "tenant is not the one of this API key; leave it empty")
    return key.tenant
