"""A balancer that keeps nothing: each choice asks all workers' schedulers and allocators."""

from scheduler_service.core import Balancer, SequenceGroup
from scheduler_service.core.placement.balancer import MAX_CANDIDATES
from scheduler_service.core.placement.worker import SEQUENCE_TOKENS, Member


class CheckedBalancer(Balancer):
    def _open_members(self) -> list[Member]:
        return [member for member in self._members.values() if member.is_open]

    def _next_lightest(self, member: Member, group: SequenceGroup) -> list[Member]:
        others = [other for other in self._open_members() if other is not member and other.entry >= 0]
        others.sort(key=lambda other: ((other.backlog + SEQUENCE_TOKENS * other.num_seqs) / other.speed, other.entry))
        slotless = [other for other in others if not other.scheduler.has_adapter_slot(group)]
        if len(slotless) >= MAX_CANDIDATES:
            others = others[: others.index(slotless[MAX_CANDIDATES - 1])]
        expected = [other for other in others if other.scheduler.room_for(group) is not None][:1]
        found = super()._next_lightest(member, group)
        assert found == expected
        return found

    def _holders(self, member: Member, group: SequenceGroup) -> list[Member]:
        """The other workers with the most cached blocks in a row, from this worker's last one on."""
        leader = group.live[0]
        keys = member.scheduler.blocks.cache.keys.findable(leader)
        here = [member.scheduler.blocks.device.find(key) is not None for key in keys]
        num_here = here.index(False) if False in here else len(here)
        lengths: dict[Member, int] = {}
        for other in self._open_members():
            there = _found_or_expected(other)
            held = [key in there for key in keys[max(0, num_here - 1) :]]
            if other is not member and any(held[:1]):
                lengths[other] = held.index(False) if False in held else len(held)
        expected = [other for other, length in lengths.items() if length == max(lengths.values())]
        found = super()._holders(member, group)
        assert set(found) <= set(expected)
        assert len(found) == len(set(found)) == min(len(expected), MAX_CANDIDATES)
        return found

    def _is_share(self, member: Member, group: SequenceGroup, cached: int, num_waiting: int) -> bool:
        tokens = len(group.live[0].token_ids) - cached + SEQUENCE_TOKENS * group.num_seqs
        tokens += 0 if group.encoder is None else len(group.encoder.input.token_ids)
        level = sum(other.work for other in self._open_members()) + num_waiting * tokens
        share = level * member.speed / sum(other.speed for other in self._open_members())
        found = super()._is_share(member, group, cached, num_waiting)
        assert found == (member.work + tokens / 2 <= share) or abs(member.work + tokens / 2 - share) < 1e-6 * share
        return found

    def check(self) -> None:
        """Assert that the directory agrees with the schedulers."""
        found: dict[bytes, int] = {}
        for slot, member in self._members.items():
            assert (member.slot, member.bit) == (slot, 1 << slot)
            assert not member.is_open or (member.scheduler.admits and not member.scheduler.swapped)
            for key in _found_or_expected(member):
                found[key] = found.get(key, 0) | member.bit
        assert self.directory._holders == found
        adapters: dict[bytes, int] = {}
        for member in self._members.values():
            for name in member.scheduler.adapters.held:
                adapters[name.encode()] = adapters.get(name.encode(), 0) | member.bit
        assert self.adapter_directory._holders == adapters
        live = [member for entry in self._lightest if (member := self._member_of(entry)) is not None]
        assert set(live) == {member for member in self._open_members() if member.entry >= 0}
        assert len(live) == len(set(live))
        assert self._num_open == len(self._open_members())


def _found_or_expected(member: Member) -> set[bytes]:
    """Keys of the worker's cached blocks, and of blocks that its running sequences will compute."""
    expected = [
        key
        for group in member.scheduler.running
        for sequence in group.live
        for key in sequence.block_keys[sequence.num_published_blocks : sequence.num_expected_blocks]
    ]
    return {*member.scheduler.blocks.device._by_key, *expected}
