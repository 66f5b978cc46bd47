"""Texts that front ends store for clients, such as the responses of /v1/responses, for all front ends to read.

The texts are in the engine's memory, because clients reach any front end. They are lost when the engine ends.
"""

from collections import OrderedDict

from pagewire.v1 import engine_service_pb2 as pb

MAX_BYTES = 64 << 20
"""Bytes of all tenants' texts."""
TENANT_BYTES = 16 << 20
TENANT_ENTRIES = 1024
ENTRY_BYTES = 256
"""Approximate bytes of memory for a text, in addition to the text."""


class StoredEntries:
    """Texts by tenant and id. When memory is scarce, the least recently used text goes.

    A tenant has limits of its own. If all tenants together have too much, a text of the largest tenant goes.
    """

    def __init__(
        self, most_bytes: int = MAX_BYTES, tenant_bytes: int = TENANT_BYTES, tenant_entries: int = TENANT_ENTRIES
    ) -> None:
        self._most_bytes, self._tenant_bytes, self._tenant_entries = most_bytes, tenant_bytes, tenant_entries
        self._entries: dict[str, OrderedDict[str, bytes]] = {}  # of each tenant, the least recently used text first
        self._num_bytes: dict[str, int] = {}  # of each tenant

    def answer(self, event: pb.FrontendEvent) -> pb.Answer:
        """The answer to StoreEntry, ReadEntry or DeleteEntry."""
        if event.HasField("store_entry"):
            self.store(event.store_entry.tenant, event.store_entry.id, event.store_entry.data)
            return pb.Answer()
        if event.HasField("read_entry"):
            data = self.read(event.read_entry.tenant, event.read_entry.id)
            return pb.Answer(found=data is not None, data=data or b"")
        return pb.Answer(found=self.delete(event.delete_entry.tenant, event.delete_entry.id))

    def store(self, tenant: str, entry_id: str, data: bytes) -> None:
        """Store a text, which may be too large to stay."""
        self.delete(tenant, entry_id)
        entries = self._entries.setdefault(tenant, OrderedDict())
        entries[entry_id] = data
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + len(data) + ENTRY_BYTES
        while self._num_bytes.get(tenant, 0) > self._tenant_bytes or len(entries) > self._tenant_entries:
            self._delete_oldest(tenant)
        while sum(self._num_bytes.values()) > self._most_bytes:
            self._delete_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def read(self, tenant: str, entry_id: str) -> bytes | None:
        """A text, which counts as used; None if there is none."""
        entries = self._entries.get(tenant)
        if entries is None or entry_id not in entries:
            return None
        entries.move_to_end(entry_id)
        return entries[entry_id]

    def delete(self, tenant: str, entry_id: str) -> bool:
        """Forget a text. Returns whether it was there."""
        entries = self._entries.get(tenant)
        if entries is None or entry_id not in entries:
            return False
        self._num_bytes[tenant] -= len(entries.pop(entry_id)) + ENTRY_BYTES
        if not entries:
            del self._entries[tenant], self._num_bytes[tenant]
        return True

    def _delete_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._entries[tenant])))
