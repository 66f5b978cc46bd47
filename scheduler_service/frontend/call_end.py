"""How a call ended, for the one line that the log has of it."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pagewire_common.errors import RequestError
from scheduler_service.access.caller import caller
from scheduler_service.frontend.sampling_validation import MAX_STRING


@dataclass
class CallEnd:
    """`status` is a status's name, `sentence` what the client was told."""

    status: str = "OK"
    sentence: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note how what is done in the block ends."""
        try:
            yield
        except RequestError as error:
            self.status, self.sentence = error.code.name, str(error)
            raise
        except asyncio.CancelledError:
            self.status = "CANCELLED"
            raise
        except BaseException:
            self.status = "INTERNAL"
            raise


def names_of(tenant: str, lora_name: str) -> dict[str, Any]:
    """Whose a call is, and which adapter it names, for its line in the log."""
    key = caller.get()
    names = {"tenant": (tenant if key is None else key.tenant)[:MAX_STRING]}
    if key is not None:
        names["api_key"] = key.id
    if lora_name:
        names["lora_name"] = lora_name[:MAX_STRING]
    return names
