"""The scheduler in its simplest form: plain lists, linear scans, and nothing counted, cached or kept between steps.

The decisions are those of `scheduler_service.core.Scheduler`, without suspects, because no worker is lost. `BeamSearch`
chooses beams; it has its own oracle.
"""

from dataclasses import dataclass

from slow_blocks import SlowBlocks
from slow_groups import Block, Key, SlowGroup, SlowQueue, SlowSequence
from slow_images import SlowImages
from slow_loras import SlowLoras
from workloads import IMAGE_BYTES

from scheduler_service.core import PhaseRule, PreemptionMode, SchedulerConfig, SequenceStatus
from scheduler_service.core.queues import waiting_queue


@dataclass
class SlowStep:
    chunks: list[tuple[SlowSequence, int, bool, int]]
    """Sequence, tokens, whether it samples, and how often it had been preempted before."""
    decisions: dict[str, object]
    is_empty: bool
    began: float | None
    rooms: dict[SlowSequence, int]
    """The most drafts of each sequence."""


class SlowScheduler(SlowBlocks):
    def __init__(self, config: SchedulerConfig, queue: SlowQueue) -> None:
        super().__init__(config)
        self.queue = queue
        self.adapters = SlowLoras(self)
        self.images = SlowImages(self)
        self.ended: list[SlowSequence] = []  # that the worker is to be told of
        self.prompt_seconds = 0.0
        self.num_in_flight = 0  # steps
        self.num_preemptions = dict.fromkeys((PreemptionMode.RECOMPUTE, PreemptionMode.SWAP), 0)

    @property
    def tokens_left(self) -> int:
        return self.tokens_left_without([])

    @property
    def encoder_tokens_left(self) -> int:
        taken = [num_tokens for sequence, num_tokens, _ in self.plan if sequence.is_encoder]
        return self.config.max_num_encoder_tokens - sum(taken)

    @property
    def bytes_left(self) -> int:
        """Bytes left in the step. Some must have been left before its last sequence."""
        to_tell = [self.bytes_to_tell(s, num_tokens) for s, num_tokens, _ in self.plan if not s.is_encoder]
        encoders = dict.fromkeys(sequence.group.encoder for sequence, _, _ in self.plan)  # which are told of first
        to_tell += [self.bytes_to_tell(encoder, 0) for encoder in encoders if encoder]
        return self.config.max_step_bytes - sum(to_tell) - 10 * self.num_swapped_in

    def bytes_to_tell(self, sequence: SlowSequence, num_tokens: int) -> int:
        """Five bytes for every number in a list, sixteen for a pair or an inner list, 64 for an image, 256 for the
        rest; and the data of images."""
        if sequence.is_table_known:
            return 0
        if sequence.is_encoder:
            to_read = sequence.token_ids if sequence.uncomputed and not sequence.is_known else []
            adapter = "" if sequence.is_known else sequence.group.lora
            return 256 + 5 * (len(sequence.device[0]) + len(to_read)) + 4 * len(adapter)
        numbers = []
        for layers, table in zip(self.layers, sequence.device, strict=True):
            numbers += [None] * max(self.entries_for(layers, sequence.computed + num_tokens), len(table))
        sampling, lists, name, num_bytes = sequence.group.sampling, [], "", 256
        if not sequence.is_known and sequence.parent is not None and sequence.parent.is_known:
            numbers += sequence.token_ids[sequence.num_parents_tokens :]
        elif not sequence.is_known:
            numbers += [*sequence.token_ids, *sampling.eos_token_ids, *sampling.stop_token_ids]
            numbers += [*sampling.allowed_token_ids, *(token for word in sampling.bad_words for token in word)]
            lists, name = [*sampling.logit_bias.items(), *sampling.bad_words], sequence.group.lora + sampling.form
            digests = {image.name.digest for image in sequence.group.images}
            num_bytes += 64 * len(sequence.group.images) + IMAGE_BYTES * len(digests)
        return num_bytes + 5 * len(numbers) + 16 * len(lists) + 4 * len(name)

    def most_at_first(self, sequence: SlowSequence, before: list[SlowSequence]) -> int:
        """Tokens in the first round. A long prompt gets half of the previous long one's."""
        cap = longest = self.config.max_prefill_chunk or self.config.max_num_batched_tokens
        if (due := self.due(sequence)) <= longest:
            return due
        for other in [planned for planned, _, _ in self.plan] + before:
            if self.due(other) > longest and not other.is_encoder:
                cap = max(1, cap // 2)
        return cap

    def schedule(self, now: float) -> SlowStep:
        self.plan, self.has_copied_states = [], []
        self.filled: list[Block] = []  # by this step, and found
        self.preempted: list[tuple[str, int, int]] = []
        self.ignored: list[str] = []
        self.has_preempted = False
        self.slotless: list[SlowGroup] = []  # groups that are passed over, because their adapters have no slot
        self.awaiting: list[SlowGroup] = []  # or because those can still be brought here
        self.sharing: list[SlowGroup] = []  # or because others compute their prefixes
        self.now, self.num_reserved_seqs = now, 0
        self.given_up: list[Key] = []
        self.backlog: int | None = None
        self.lacking: list[str] = []
        self.num_swapped_out = self.num_swapped_in = 0
        self.arriving: list[Block] = []  # which this step swaps in
        has_work = self.running or self.swapped or self.queue.groups or self.ended
        to_try = set(self.adapters.unused) if has_work else set()
        for group in self.running:
            for sequence in group.live:
                self.drop_behind_windows(sequence)
        ready = [group for group in self.running if not group.is_behind]
        behind = [group for group in self.running if group.is_behind]
        began = None
        if self.config.phase_rule is PhaseRule.CHUNKED:
            self.grow_all(ready + behind)
            if self.swapped:
                self.admit()
                self.resume()
            self.admit()
        else:
            self.grow_all(behind)
            if self.swapped:
                if self.may_admit(now):
                    self.admit()
                self.resume("prompts")
            if self.may_admit(now):
                self.admit()
            if any(num_tokens for _, num_tokens, _ in self.plan):
                began = now
            else:
                self.grow_all(ready)
                self.resume("decodes")
        self.hand_out_rest()
        if self.sharing:
            self.sharing, self.num_reserved_seqs = [], 0
            self.admit()
            self.hand_out_rest()
        self.hand_out_rooms()
        num_kept = 0
        if self.has_states:
            self.release_known()
            for sequence in [sequence for sequence, num_tokens, _ in self.plan if num_tokens]:
                num_kept += self.keep_states(sequence) if sequence not in self.has_copied_states else 0
        self.num_kept = num_kept
        self.adapters.tried |= to_try
        return self.write(began)

    def may_admit(self, now: float) -> bool:
        if not self.queue.groups or not self.running:
            return True
        return (
            now - min(group.arrived_at for group in self.queue.groups) >= self.config.delay_factor * self.prompt_seconds
        )

    def grow_all(self, groups: list[SlowGroup]) -> None:
        for group in groups:
            if group in self.running:
                self.grow(group)

    def grow(self, group: SlowGroup) -> None:
        if group.live[0].device is None:  # its leader ended before the others could fork
            self.begin_anew(group)
            return
        while self.num_new_blocks(chunks := self.chunks_of(group)) > self.num_free:
            if self.running == [group]:
                if self.kept:
                    self.release_kept([*self.kept], is_sound=False)
                    continue
                self.ignore(group)
                return
            victim = self.queue.victim(self.running)
            self.preempt(victim)
            if victim is group:
                return
        for sequence, num_tokens in chunks:
            self.plan.append((sequence, num_tokens, self.append_slots(sequence, num_tokens)))
        for sequence, num_tokens in chunks:
            self.tell_of(sequence, num_tokens)

    def tell_of(self, sequence: SlowSequence, num_tokens: int) -> None:
        """The step's tokens are cached from now on, and the rest of the known tokens is expected."""
        if num_tokens > 1 or sequence.is_encoder:
            self.filled += self.offer(sequence, min(sequence.computed + num_tokens, len(sequence.token_ids)))
        is_found = not self.is_withdrawn(sequence, sequence.num_offered) and not self.has_states
        if not sequence.is_encoder and is_found and sequence.uncomputed > 1:
            sequence.num_expected = max(sequence.num_expected, len(sequence.token_ids) // self.config.block_size)

    def is_tied(self, group: SlowGroup) -> bool:
        """Whether the group computes for another in this step, or another for it."""
        others = self.held("device", but_by=[group])
        own = [block for s in group.live_and_encoder for table in s.device or () for block in table]
        return any(block in self.filled and block in others for block in own)

    def chunks_of(self, group: SlowGroup) -> list[tuple[SlowSequence, int]]:
        chunks, left, bytes_left = [], self.tokens_left, self.bytes_left
        if encoder := group.encoder:
            to_tell = self.bytes_to_tell(encoder, 0)
            if encoder.uncomputed:
                if encoder.uncomputed > self.encoder_tokens_left or (to_tell and bytes_left <= 0):
                    return []
                chunks.append((encoder, encoder.uncomputed))
                bytes_left -= to_tell
                to_tell = 0
        catching_up = [sequence for sequence in group.live if sequence.device is not None and sequence.uncomputed > 1]
        are_apart = self.config.phase_rule is PhaseRule.SEPARATE and catching_up  # none decodes among those
        for sequence in catching_up if are_apart else group.live:
            num_tokens = min(self.most_at_first(sequence, [s for s, _ in chunks]), left)
            num_tokens = self.images.reach(group, sequence.computed, num_tokens, left)
            is_told = num_tokens or (group.images and not sequence.is_known)
            if is_told and sequence.device is not None and (sequence.is_table_known or bytes_left > 0):
                chunks.append((sequence, num_tokens))
                left -= num_tokens
                bytes_left -= self.bytes_to_tell(sequence, num_tokens)
                if encoder:
                    bytes_left, to_tell = bytes_left - to_tell, 0
        return chunks

    def preempt(self, group: SlowGroup) -> None:
        """Groups with blocks to be filled by copies, or beams whose successors are awaited, cannot be swapped."""
        copies = sum(num_copies for sequence, _, num_copies in self.plan if sequence.group is group)
        for sequence, _, _ in self.plan:
            if sequence.group is group:  # what is not computed is not found
                for number, table in enumerate(sequence.device):
                    if self.layers[number].has_states:
                        continue
                    first = sequence.computed // self.layers[number].block_size
                    for block in table[first : sequence.num_offered * self.in_page(number)]:
                        block.key = None
                sequence.num_offered = min(sequence.computed // self.config.block_size, sequence.num_offered)
        self.plan = [chunk for chunk in self.plan if chunk[0].group is not group]
        is_awaited = group.beams and any(sequence.stored < sequence.computed for sequence in group.live)
        held = [block for sequence in group.live_and_encoder for table in sequence.device or () for block in table]
        arrives = any(block in self.arriving for block in held if block)
        mode = PreemptionMode.RECOMPUTE if copies or is_awaited or arrives else self.mode_for(group)
        self.num_preemptions[mode] += 1
        self.has_preempted = True
        if mode is PreemptionMode.SWAP:
            for sequence in group.live:
                sequence.begun = []
            self.num_swapped_out += len(self.move(group, to_host=True))
            self.running.remove(group)
            self.swapped.insert(0, group)
            return
        self.begin_anew(group)

    def begin_anew(self, group: SlowGroup) -> None:
        self.preempted += [sequence.label for sequence in group.live_and_encoder if sequence.is_known]
        for sequence in group.live_and_encoder:
            self.drop_tables(sequence)
            sequence.begin_anew()
        self.running.remove(group)
        self.adapters.left(group)
        self.queue.put_back(group)

    def resume(self, phase: str = "both") -> None:
        while self.next_swapped() and self.tokens_left and self.bytes_left > 0 and not self.has_preempted:
            group = self.next_swapped()
            has_adapter_slot = self.has_adapter_slot(group, self.running)
            if has_adapter_slot and phase == ("decodes" if group.is_behind else "prompts"):
                return
            if self.num_blocks_back(group, alone=True) > self.config.num_device_blocks:
                self.ignore(group)
                continue
            has_room = self.num_blocks_back(group, alone=False) + self.num_reserved <= self.num_free
            if not has_adapter_slot and self.may_pass_over(group):
                self.slotless.append(group)
                continue
            if not has_room or not self.has_slots(group, self.running):
                return
            if self.is_next_waiting() and self.adapters.has(self.next_waiting().lora):
                return
            if any(other.num_overtaken == 16 for other in self.slotless):
                return
            for other in self.slotless:
                other.num_overtaken += 1
            self.swapped.remove(group)
            self.running.append(group)
            num_swapped_in = len(arriving := self.move(group, to_host=False))
            self.arriving += arriving
            self.grow(group)
            self.num_swapped_in += num_swapped_in

    def has_adapter_slot(self, group: SlowGroup, running: list[SlowGroup]) -> bool:
        others = {other.lora for other in running if other is not group} - {"", group.lora}
        return not group.lora or (self.adapters.has(group.lora) and len(others) < self.config.max_loras)

    def has_slots(self, group: SlowGroup, running: list[SlowGroup]) -> bool:
        """Whether sequences and adapter fit beside the running groups."""
        num_seqs = (
            group.num_seqs + sum(other.num_seqs for other in running if other is not group) + self.num_reserved_seqs
        )
        return num_seqs <= self.config.max_num_seqs and self.has_adapter_slot(group, running)

    def fits(self, group: SlowGroup, victims: list[SlowGroup]) -> bool:
        """Whether a waiting group could start without these running ones."""
        rest = [other for other in self.running if other not in victims]
        held = self.held("device", but_by=victims)
        encoded = self.cached_encoder(group)
        num_pages, cached = self.cached(leader := group.live[0])
        shared = [table for layers, table in zip(self.layers, cached, strict=True) if not layers.has_states]
        needed = self.blocks_of(group) - sum(block in held for table in [*shared, encoded] for block in table)
        for layers, table in zip(self.layers, cached, strict=True):
            first_entries = self.first_entries(layers, leader, num_pages * self.config.block_size)
            needed += first_entries - self.first_entries(layers, leader) - table.count(None)
        num_reserved = self.num_reserved if rest else 0
        if not self.tokens_left_without(victims):
            return False
        if not self.can_encode(group):
            return False
        return needed + num_reserved <= self.config.num_device_blocks - len(held) and self.has_slots(group, rest)

    def can_encode(self, group: SlowGroup) -> bool:
        """Whether the step has room for the encoder's input, unless it is cached."""
        return bool(self.cached_encoder(group)) or len(group.encoder_tokens) <= self.encoder_tokens_left

    def tokens_left_without(self, victims: list[SlowGroup]) -> int:
        others = [n for sequence, n, _ in self.plan if sequence.group not in victims and not sequence.is_encoder]
        return self.config.max_num_batched_tokens - sum(others)

    def make_room(self, group: SlowGroup) -> bool:
        victims: list[SlowGroup] = []
        if not (self.adapters.has(group.lora) and self.can_encode(group)):
            return False
        while not self.fits(group, victims):
            rest = [other for other in self.running if other not in victims]
            if not rest or self.num_swapped_in or not self.queue.outranks(group, self.queue.victim(rest)):
                return False
            if self.is_tied(self.queue.victim(rest)):
                return False
            victims.append(self.queue.victim(rest))
            if not self.tokens_left_without(victims):
                return False
        for victim in victims:
            self.preempt(victim)
        return True

    def next_waiting(self) -> SlowGroup | None:
        """No request is overtaken a seventeenth time."""
        if any(group.num_overtaken == 16 for group in self.slotless):
            return None
        passed = self.slotless + self.awaiting + self.sharing
        groups = [group for group in self.queue.in_order() if group not in passed]
        return next((group for group in groups if not self.is_lane_full(group)), None)

    def is_lane_full(self, group: SlowGroup) -> bool:
        """Whether too many requests (of the tenant, if tenants take turns) wait for prefixes already."""
        lane = [other for other in self.sharing if self.queue.policy != "fair" or other.tenant == group.tenant]
        return len(lane) >= waiting_queue.MAX_SHARING

    def next_swapped(self) -> SlowGroup | None:
        return next((group for group in self.swapped if group not in self.slotless), None)

    def is_next_waiting(self) -> bool:
        """Whether a waiting group is next; it must outrank the swapped ones."""
        group, swapped = self.next_waiting(), self.next_swapped()
        return group is not None and (swapped is None or self.queue.outranks(group, swapped))

    def may_pass_over(self, group: SlowGroup) -> bool:
        """Whether others may overtake a group without a slot, as far as the step has room for others."""
        num_seqs = sum(other.num_seqs for other in self.running) + self.num_reserved_seqs
        if num_seqs >= self.config.max_num_seqs or not self.tokens_left:
            return False
        has_adapter = self.adapters.has(group.lora)
        if not has_adapter and group.lora not in self.lacking:
            self.lacking.append(group.lora)
        self.is_awaiting = not has_adapter and self.adapters.can_come(group.lora) and len(self.awaiting) < 256
        return self.is_awaiting or (group.num_overtaken < 16 and len(self.slotless) < 32)

    def admit(self) -> None:
        while self.is_next_waiting() and self.bytes_left > 0 and not self.has_preempted:
            group = self.next_waiting()
            is_too_long = len(group.encoder_tokens) > self.config.max_num_encoder_tokens
            is_too_long = is_too_long or self.images.are_too_large(group)
            if group.num_seqs > self.config.max_num_seqs or is_too_long or self.never_fits(group):
                self.queue.leave(group)
                self.ignore(group)
                continue
            if self.awaits(group):
                self.sharing.append(group)  # and those behind it take no place from it
                left = self.config.max_num_seqs - sum(other.num_seqs for other in self.running)
                most = min(left, self.config.max_num_seqs // 2) - self.num_reserved_seqs
                self.num_reserved_seqs += min(group.num_seqs, most)
                continue
            has_room = self.fits(group, []) if self.slotless else self.make_room(group)
            if not has_room:
                if self.has_adapter_slot(group, self.running) or not self.may_pass_over(group):
                    return
                (self.awaiting if self.is_awaiting else self.slotless).append(group)
                continue
            for other in self.slotless:
                other.num_overtaken += 1
            self.queue.leave(group)
            self.running.append(group)
            self.adapters.came(group)
            group.first_missing = None
            for sequence in group.live:
                most = min(len(group.prompt) + group.sampling.max_tokens, self.config.max_sequence_tokens)
                sequence.max_num_tokens = max(most, len(group.prompt) + 1)
            leader, encoder = group.live[0], group.encoder
            leader.num_offered, leader.device = self.cached(leader)
            encoded = self.cached_encoder(group)
            found = [block for table in [*leader.device, encoded] for block in table]
            self.let_go["device"] = [block for block in self.let_go["device"] if block not in found]
            if encoder:
                encoder.device, encoder.num_offered = [encoded], len(encoded)
                encoder.computed = encoder.stored = len(encoder.token_ids) if encoded else 0
                while len(encoded) < self.blocks_for(self.layers[0], len(encoder.token_ids)):
                    encoded.append(self.new_block("device"))
            leader.computed = leader.stored = leader.num_offered * self.config.block_size
            for layers, table in zip(self.layers, leader.device, strict=True):
                first_entries = self.first_entries(layers, leader, leader.computed)
                while len(table) < first_entries:
                    table.append(self.new_block("device"))
            if group.num_cached is None:
                group.num_cached = leader.computed + (encoder.computed if encoder else 0)
                self.queue.charge(group, len(group.prompt) + len(group.encoder_tokens))
            chunks = self.chunks_of(group)
            for sequence, num_tokens in chunks:
                self.plan.append(
                    (sequence, num_tokens, self.append_slots(sequence, num_tokens) if self.has_states else 0)
                )
            for sequence, num_tokens in chunks:
                self.tell_of(sequence, num_tokens)

    def awaits(self, group: SlowGroup) -> bool:
        """Whether the group waits for blocks of others, for at most the time to compute behind all that runs. One gives
        up for each block, and the others' time begins anew.
        """
        if not self.expected() and not self.has_states:
            return False
        leader, known = group.live[0], group.first_missing
        if self.has_states:
            first, key = self.await_states(leader)
        else:
            first = self.num_in_run(leader, known or 0)
            key = self.awaited(leader, first)
        if not key:
            return False
        if known != first or key in self.given_up:
            if self.backlog is None:
                placed = [s for other in self.running for s in other.live if s.device is not None]
                self.backlog = sum(max(0, len(s.token_ids) - s.computed) for s in placed)
            num_missing = len(leader.token_ids) - first * self.config.block_size
            speed = self.config.prefill_tokens_per_second or 10_000
            group.first_missing = first
            group.waits_until = self.now + 1 / speed * (self.backlog + num_missing)
        if self.now <= group.waits_until or key in self.given_up:
            return True
        self.given_up.append(key)
        return False

    def hand_out_rest(self) -> None:
        """From first to last, plan each anew with what the others leave, if blocks are free."""
        for index, (sequence, num_tokens, num_copies) in enumerate(self.plan):
            most = min(self.due(sequence), num_tokens + self.tokens_left)
            if any(layers.window for layers in self.config.groups):
                most = min(most, self.config.max_prefill_chunk or most)
            if most > num_tokens:
                most = self.images.reach(sequence.group, sequence.computed, most)
            if most > num_tokens and self.num_new_blocks([(sequence, most)]) <= self.num_free:
                self.plan[index] = (sequence, most, num_copies + self.append_slots(sequence, most))
                self.tell_of(sequence, most)

    def hand_out_rooms(self) -> None:
        """Room for drafts, for sequences that compute one token, from the tokens and free blocks that are left."""
        self.rooms: dict[SlowSequence, int] = {}
        wanting = [s for s, num_tokens, _ in self.plan if num_tokens == s.uncomputed == 1 and s.num_wanted]
        share = self.tokens_left // max(1, len(wanting))
        for sequence in wanting:
            half = (sequence.max_num_tokens - (sequence.computed + 1) - 1) // 2
            uncertain = sequence.num_drafted + 1
            room = min(share, sequence.num_wanted, half, self.longest_chunk() - uncertain)
            watermark = int(self.config.watermark * self.config.num_device_blocks)
            to_spare = max(0, self.num_free - watermark)
            if room > 0 and self.num_new_blocks([(sequence, 1 + room)]) > to_spare:  # then only what needs none
                room = max(r for r in range(room) if not r or not self.num_new_blocks([(sequence, 1 + r)]))
            if room > 0:
                self.append_slots(sequence, 1 + room)
                self.rooms[sequence] = room

    def ignore(self, group: SlowGroup) -> None:
        self.ignored.append(group.name)
        for sequence in group.live:
            self.end(sequence, SequenceStatus.FINISHED_IGNORED)

    def write(self, began: float | None) -> SlowStep:
        chunks, rooms, tells = [], self.rooms, False
        encoded, dropped = self.images.write()
        for sequence, num_tokens, _ in self.plan:
            samples = num_tokens >= sequence.uncomputed and not sequence.is_encoder
            num_tokens += rooms.get(sequence, 0)
            sequence.num_drafted += rooms.get(sequence, 0)
            if not num_tokens:  # the worker is told of it
                sequence.is_known = sequence.is_table_known = tells = True
                continue
            chunks.append((sequence, num_tokens, samples, sequence.num_lives))
            sequence.computed += num_tokens
            for told in (sequence, sequence.group.encoder):
                if told:
                    told.is_known = told.is_table_known = True
            if sequence.is_encoder:
                continue
            num_shared = sequence.num_prompt_tokens - self.has_states
            if sequence.computed >= num_shared:
                for follower in sequence.group.live:
                    if follower.device is None:
                        self.fork(sequence, follower, min(num_shared, len(follower.token_ids) - 1))
                        self.images.forked(sequence, follower)
                        follower.num_parents_tokens = len(sequence.group.prompt)
        is_empty = not (chunks or tells or self.ended or self.preempted or self.num_swapped_out or self.num_swapped_in)
        ahead = self.images.ahead(is_empty) if self.config.prepares_images else []
        is_empty = is_empty and not ahead
        self.num_in_flight += not is_empty
        decisions = {
            "scheduled": [(s.label, s.computed, num_tokens, samples) for s, num_tokens, samples, _ in chunks],
            "rooms": {sequence.label: room for sequence, room in rooms.items()},
            "preempted": self.preempted,
            "ignored": self.ignored,
            "finished": [sequence.label for sequence in self.ended],
            "copies": sum(num_copies for _, _, num_copies in self.plan) + self.num_kept,
            "swapped out": self.num_swapped_out,
            "swapped in": self.num_swapped_in,
            "lacking": self.lacking,
            "encoded": encoded,
            "dropped": dropped,
            "ahead": ahead,
        }
        for sequence in self.ended:
            sequence.is_known = False
        self.let_states_go()
        self.ended = []
        return SlowStep(chunks, decisions, is_empty, began, rooms)

    def want(self, step: SlowStep, wanted: dict[SlowSequence, int]) -> None:
        """Room for drafts, in later steps, of the sequences that this one has sampled."""
        for sequence, _, _, life in step.chunks:
            if sequence in wanted and sequence.num_lives == life and not sequence.group.beams:
                sequence.num_wanted = min(wanted[sequence], self.config.num_lookahead_slots)

    # ---- the answer, and ends

    def take_in(self, step: SlowStep, answers: list[tuple[list[int], list[tuple[int, float]]]], now: float) -> None:
        """An answer is the accepted drafts, one more token, and the likeliest tokens with their log-probabilities."""
        self.num_in_flight -= 1
        if step.began is not None:
            self.prompt_seconds = now - step.began
        left = iter(answers)
        given = [next(left) if samples else ([None], None) for _, _, samples, _ in step.chunks]
        for (sequence, _, _, life), ((*right, _), _) in zip(step.chunks, given, strict=True):
            if sequence in step.rooms and sequence.status is None and sequence.num_lives == life:
                num_unused = step.rooms[sequence] - len(right)
                sequence.num_drafted -= step.rooms[sequence]
                for token in right:
                    if sequence.status is None:
                        self.append_token(sequence, token)
                sequence.computed -= num_unused
                sequence.stored -= num_unused
        for (sequence, num_tokens, _, life), ((*_, token), candidates) in zip(step.chunks, given, strict=True):
            if sequence.status is not None or sequence.num_lives != life:
                continue
            sequence.stored += num_tokens
            if num_tokens > 1 or sequence.stored % self.config.block_size == 0:
                self.offer(sequence, sequence.stored)
            if sequence.is_encoder:
                continue
            if sequence.group.beams:
                sequence.candidates = candidates
            elif token is not None:
                self.append_token(sequence, token)
        for group in dict.fromkeys(sequence.group for sequence, *_ in step.chunks):
            if group.beams and group.live and all(beam.candidates for beam in group.live):
                self.advance(group)

    def append_token(self, sequence: SlowSequence, token: int) -> None:
        sequence.token_ids.append(token)
        self.queue.charge(sequence.group, 2)
        sampling = sequence.group.sampling
        if sequence.num_output_tokens > sampling.min_tokens and token in sampling.end_token_ids:
            self.end(sequence, SequenceStatus.FINISHED_STOPPED)
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            self.end(sequence, SequenceStatus.FINISHED_LENGTH_CAPPED)

    def advance(self, group: SlowGroup) -> None:
        beams = group.live
        self.queue.charge(group, 2 * len(beams))
        children = []
        for parent, token, score in group.beams.advance(beams):
            child = SlowSequence(group, 0, [*parent.token_ids, token])
            child.max_num_tokens, child.score = parent.max_num_tokens, score
            self.fork(parent, child, parent.stored)
            child.num_parents_tokens = len(parent.token_ids)
            children.append(child)
        group.sequences = beams + children
        for beam in beams:
            self.end(beam, SequenceStatus.FINISHED_STOPPED)
        group.sequences = children or beams

    def end(self, sequence: SlowSequence, status: SequenceStatus) -> None:
        if sequence.status is not None:
            return
        sequence.status = status
        self.leave_worker(sequence)
        group = sequence.group
        if not group.live:
            if group.encoder:
                self.leave_worker(group.encoder)
            if group in self.running + self.swapped:
                self.adapters.left(group)
            self.running = [other for other in self.running if other is not group]
            self.swapped = [other for other in self.swapped if other is not group]
            if group in self.queue.groups:
                self.queue.leave(group)

    def leave_worker(self, sequence: SlowSequence) -> None:
        self.drop_tables(sequence)
        self.drop_tables(sequence, pool="host")
        sequence.device = sequence.host = None
        if sequence.is_known:
            self.ended.append(sequence)
