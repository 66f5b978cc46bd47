"""The API key of the current call."""

from collections.abc import Callable
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError
from pagewire_common.serving.lock import Check
from scheduler_service.access.keys import ApiKey, Keyring

caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)
"""The API key of the current call; None if calls need no key."""


def key_check(keyring: Callable[[], Keyring | None], *, admin: bool = False) -> Check:
    """Create a check that each call has a valid API key. With `admin`, the key must be an administrator's key.

    If `keyring` returns None, calls need no key.
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
    """The tenant of the current call: the API key's tenant or, if calls need no key, the tenant in the request.

    Raises PERMISSION_DENIED if the requested tenant differs from the key's tenant.
    """
    if (key := caller.get()) is None:
        return asked
    if asked not in ("", key.tenant):
        raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "tenant is not the one of this API key; leave it empty")
    return key.tenant
