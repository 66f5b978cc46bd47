"""A worker without a model: every KV slot holds a hash of its prefix, which begins with the encoder's input.

It knows only SchedulerOutputs, and checks before each "attention" that every slot holds the right prefix. The sampled
token is a function of the prefix, so the right output of a request is known.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from fake_encoder import FakeEncoder

from scheduler_service.core import EncoderItem, ModelOutput, SchedulerConfig, SchedulerOutput, SequenceGroup
from scheduler_service.core.blocks.tables import NO_BLOCK
from scheduler_service.core.groups.prompt_item import Items
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence
from scheduler_service.core.outputs import TokenLogprobs

VOCABULARY = 50


def extend(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token + 1) & 0xFFFFFFFFFFFF


def sample(prefix: int, index: int) -> int:
    return (prefix ^ (prefix >> 17)) * (2 * index + 3) % VOCABULARY


def seed_of(group: SequenceGroup) -> int:
    """The encoder's part of a group's prefixes, if any."""
    return 0 if group.encoder is None else prefix_of(list(group.encoder.input.token_ids), 1)


def read_tokens(sequence: Sequence) -> list[int]:
    """What a worker reads: numbers made of an item's digest in place of its placeholders."""
    tokens = list(sequence.token_ids)
    for item in sequence.group.items:
        content = (int.from_bytes(item.digest[:4], "little") << 8) + (item.part << 6)
        tokens[item.start : item.stop] = range(content, content + item.num_embeddings)
    return tokens


def prefix_of(tokens: list[int], prefix: int = 0) -> int:
    for token in tokens:
        prefix = extend(prefix, token)
    return prefix


def candidates(prefix: int) -> list[tuple[int, float]]:
    """Every token with its log-probability after this prefix, likeliest first."""
    scores = [(token, -((extend(prefix, token) >> 7) % 997) / 300 - token / 1e5) for token in range(VOCABULARY)]
    return sorted(scores, key=lambda score: -score[1])


def reference_beams(group: SequenceGroup, max_sequence_tokens: int) -> list[list[int]]:
    """Beam search over the whole vocabulary, in sequence, as transformers defines it; best first."""
    sampling, prompt = group.sampling, read_tokens(group.sequences[0])[: len(group.prompt_token_ids)]
    seed = seed_of(group)
    width, ends = sampling.beam_width, sampling.eos_token_ids | sampling.stop_token_ids
    most = min(sampling.max_tokens, max(1, max_sequence_tokens - len(prompt)))
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    complete: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        scored = [
            (score + logprob, [*output, token])
            for score, output in running
            for token, logprob in candidates(prefix_of(prompt + output, seed))
            if token not in ends or length > sampling.min_tokens
        ]
        scored.sort(key=lambda item: -item[0])
        hits = [length == most or output[-1] in ends for _, output in scored]
        complete += [
            (s / length**sampling.length_penalty, o)
            for (s, o), hit in list(zip(scored, hits, strict=True))[:width]
            if hit
        ]
        complete = sorted(complete, key=lambda item: -item[0])[:width]
        running = [item for item, hit in zip(scored, hits, strict=True) if not hit][:width]
        if not running:
            break
        if len(complete) == width and (
            sampling.early_stopping or running[0][0] / length**sampling.length_penalty <= complete[-1][0]
        ):
            break
    return [output for _, output in complete]


def reference_output(group: SequenceGroup, index: int, max_sequence_tokens: int) -> list[int]:
    """One output of a request, computed alone and simply."""
    prefix = seed_of(group)
    sequence, sampling = group.sequences[index], group.sampling
    for token in read_tokens(sequence)[: sequence.num_prompt_tokens]:
        prefix = extend(prefix, token)
    output: list[int] = []
    room = max(1, max_sequence_tokens - sequence.num_prompt_tokens)
    while len(output) < min(sampling.max_tokens, room):
        output.append(sample(prefix, index))
        prefix = extend(prefix, output[-1])
        ends = sampling.eos_token_ids | sampling.stop_token_ids
        if len(output) > sampling.min_tokens and output[-1] in ends:
            break
    return output


@dataclass
class Mirror:
    tokens: list[int]
    tables: list[list[int]]
    """Of each group of layers."""
    index: int
    num_computed: int
    num_draft: int = 0
    encoder: "Mirror | None" = None
    items: Items = ()
    seed: int = 0
    known_prefixes: list[int] = field(default_factory=list)

    def prefixes(self, end: int) -> list[int]:
        """Hashes of the prefixes that end with each of the first `end` tokens, and perhaps of more."""
        known = self.known_prefixes  # tokens come and go at the end only
        prefix = known[-1] if known else self.seed
        for token in self.tokens[len(known) : end]:
            prefix = extend(prefix, token)
            known.append(prefix)
        return known

    def next_token(self) -> int:
        return sample(self.prefixes(len(self.tokens))[-1], self.index)

    def cut(self, length: int) -> list[int]:
        """Remove and return the tokens from `length` on."""
        tokens = self.tokens[length:]
        del self.tokens[length:], self.known_prefixes[length:]
        return tokens


@dataclass
class FakeWorker:
    config: SchedulerConfig
    mirrors: dict[int, Mirror] = field(default_factory=dict)
    last_step: int = 0
    drafting: Random | None = None
    """Draws the number of drafts, the right ones, and the room wanted."""
    reading: Random | None = None
    """Draws the outputs that gain no token because their form is still being parsed."""

    def __post_init__(self) -> None:
        empty = [-1] * self.config.block_size
        self.slots: list[list[int]] = [list(empty) for _ in range(self.config.num_device_blocks)]
        self.items: set[bytes] = set()
        self.prepared: list[EncoderItem] = []
        self.encoder = FakeEncoder(self.config)
        self.host_slots: list[list[int]] = [list(empty) for _ in range(self.config.num_host_blocks)]

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        assert output.step_id == self.last_step + 1, "a gap in the step ids"
        self.last_step = output.step_id
        for sequence_id in output.preempted:
            del self.mirrors[sequence_id]
        for source, destination in output.blocks_to_swap_out:
            self.host_slots[destination] = list(self.slots[source])
        for source, destination in output.blocks_to_swap_in:
            self.slots[destination] = list(self.host_slots[source])
        overwritten = {source for source, _ in output.blocks_to_copy} & {target for _, target in output.blocks_to_copy}
        assert not overwritten, "a block is copied and overwritten by another copy"
        for source, destination in output.blocks_to_copy:
            self.slots[destination] = list(self.slots[source])
        self.items.difference_update(output.dropped_items)
        for sequence, table, num_computed, further, items_sent in output.new_sequences:
            assert sequence.id not in self.mirrors, "a known sequence was sent as new"
            self._take_items(sequence, num_computed, items_sent)
            tables = self._tables(table, further)
            mirror = Mirror(read_tokens(sequence), tables, sequence.index, num_computed, items=sequence.group.items)
            self._give_encoder(mirror, sequence)
            self.mirrors[sequence.id] = mirror
        for parent_id, child, num_tokens, table, num_computed, further in output.forks:
            assert child.id not in self.mirrors, "a known sequence was forked"
            assert num_tokens <= len(self.mirrors[parent_id].tokens)
            tokens = self.mirrors[parent_id].tokens[:num_tokens] + child.token_ids[num_tokens:]
            parent = self.mirrors[parent_id]
            assert num_computed <= parent.num_computed, "a fork begins behind what its parent has computed"
            tables = self._tables(table, further)
            mirror = Mirror(tokens, tables, child.index, num_computed, encoder=parent.encoder, seed=parent.seed)
            mirror.items = parent.items
            self.mirrors[child.id] = mirror
        for update in output.block_table_updates:
            table = self.mirrors[update.sequence_id].tables[update.layer_group]
            assert update.start <= len(table)
            table[update.start :] = update.block_ids
        for sequence_id in output.finished:
            del self.mirrors[sequence_id]
        num_unused = {
            sequence.id: room - self._draft(self.mirrors[sequence.id], room)
            for sequence, room in output.num_draft_tokens.items()
        }
        scheduled = [(s, num_tokens - num_unused.get(s.id, 0), samples) for s, num_tokens, samples in output.scheduled]
        late = {sequence for sequence, _, samples in scheduled if samples and self._is_late(sequence)}
        failed_items = self._encode(output, scheduled)
        # A step writes all keys and values before it reads any.
        for sequence, num_tokens, samples in scheduled:
            if sequence.is_encoder:
                self._store_encoder(self.mirrors[sequence.id], num_tokens)
            else:
                num_stored = num_tokens - (sequence in late and self.config.has_states)
                self._store(self.mirrors[sequence.id], num_tokens, samples, num_stored)
                self._advance(self.mirrors[sequence.id], num_stored)
        sampled: dict[Sequence, list[int]] = {}
        for sequence, num_tokens, samples in scheduled:
            if not sequence.is_encoder:
                mirror = self.mirrors[sequence.id]
                num_skipped = int(sequence in late and self.config.has_states)
                self._attend(mirror, num_tokens - num_skipped)
                mirror.num_computed += num_skipped
                if samples:
                    sampled[sequence] = self._sample(mirror, sequence in late)
        answer = ModelOutput(output.step_id, [token for tokens in sampled.values() for token in tokens])
        answer.failed_items = failed_items
        self.prepared = [name for name in output.images_ahead if name in self.prepared]
        if not output.scheduled or output.step_id % 2:
            self.prepared += [name for name in output.images_ahead if name not in self.prepared][:1]
        answer.prepared_items = [*self.prepared]
        if output.num_draft_tokens:
            answer.num_draft_tokens = [output.num_draft_tokens.get(s, 0) - num_unused.get(s.id, 0) for s in sampled]
        if output.num_draft_tokens or not all(sampled.values()):
            answer.num_tokens = [len(tokens) for tokens in sampled.values()]
        if self.drafting is not None and self.drafting.random() < 0.5:
            answer.num_draft_tokens_wanted = [self.drafting.randrange(7) for _ in sampled]
        for sequence, tokens in sampled.items():
            if tokens and (num_logprobs := sequence.sampling.num_logprobs) is not None:
                prefixes = self.mirrors[sequence.id].prefixes(end := len(self.mirrors[sequence.id].tokens))
                answer.logprobs[sequence.id] = [
                    _report(token, candidates(prefix)[:num_logprobs])
                    for token, prefix in zip(tokens, prefixes[end - len(tokens) - 1 :], strict=False)
                ]
        return answer

    def _encode(self, output: SchedulerOutput, scheduled: list[tuple[Sequence, int, bool]]) -> list[EncoderItem]:
        mirrors = [(self.mirrors[sequence.id], num_tokens) for sequence, num_tokens, _ in scheduled]
        chunks = [(mirror.items, mirror.num_computed, num_tokens) for mirror, num_tokens in mirrors]
        return self.encoder.encode(output, chunks, self.items)

    def _take_items(self, sequence: Sequence, num_computed: int, sent: frozenset[bytes]) -> None:
        assert self.items.isdisjoint(sent), "an item was sent twice"
        self.items |= sent
        last = min(num_computed, sequence.num_prompt_tokens - 1)
        needed = {item.digest for item in sequence.group.items if item.stop > last}
        assert needed <= self.items, "an item that is needed was not sent"

    @staticmethod
    def _tables(table: list[int], further: SequenceOf[list[int]]) -> list[list[int]]:
        return [list(table), *map(list, further)]

    def _draft(self, mirror: Mirror, room: int) -> int:
        """Append drafts, most of them right; returns their number."""
        number = room if self.drafting is None else self.drafting.randint(0, room)
        for _ in range(number):
            is_right = self.drafting is None or self.drafting.random() < 0.7
            mirror.tokens.append(mirror.next_token() if is_right else self.drafting.randrange(VOCABULARY))
        mirror.num_draft = number
        return number

    def _give_encoder(self, mirror: Mirror, sequence: Sequence) -> None:
        if isinstance(sequence, EncoderSequence):
            mirror.seed = 1
        elif (encoder := sequence.group.encoder) is not None:
            mirror.encoder, mirror.seed = self.mirrors[encoder.id], seed_of(sequence.group)

    def _store_encoder(self, mirror: Mirror, num_tokens: int) -> None:
        """Every slot holds the hash of the whole input and its own place."""
        assert (mirror.num_computed, num_tokens) == (0, len(mirror.tokens)), "an encoder's input is not computed whole"
        mirror.num_computed = num_tokens
        for position, stored in enumerate(self._encoded(mirror)):
            self._write(mirror, 0, position, stored)

    def _encoded(self, mirror: Mirror) -> list[int]:
        return [extend(prefix_of(mirror.tokens, mirror.seed), position) for position in range(len(mirror.tokens))]

    def _store(self, mirror: Mirror, num_tokens: int, samples: bool, num_stored: int) -> None:
        """`num_stored`: with states, the last token of a late sequence is not stored."""
        end = mirror.num_computed + num_tokens
        assert end <= len(mirror.tokens)
        assert samples == (end == len(mirror.tokens))
        prefixes = mirror.prefixes(end)
        for number, group in enumerate(self.config.groups):
            if group.has_states:
                continue
            room = len(mirror.tables[number]) * group.block_size - self.config.num_lookahead_slots
            assert end <= room, "the block table is too short for the chunk and what may follow it"
            for position in range(mirror.num_computed, mirror.num_computed + num_stored):
                self._write(mirror, number, position, prefixes[position])

    def _advance(self, mirror: Mirror, num_tokens: int) -> None:
        """Advance the states, which must be those after all tokens so far. A late token will be computed again, and
        changes no state before."""
        end = mirror.num_computed + num_tokens
        for number, group in enumerate(self.config.groups):
            if group.has_states:
                (block,) = mirror.tables[number]
                if mirror.num_computed:
                    before = mirror.prefixes(mirror.num_computed)[mirror.num_computed - 1]
                    assert self.slots[block][0] == before + number, f"others' states after {mirror.num_computed} tokens"
                if end:
                    self.slots[block][0] = mirror.prefixes(end)[end - 1] + number

    def _is_late(self, sequence: Sequence) -> bool:
        return bool(sequence.sampling.form and self.reading and self.reading.random() < 0.5)

    def _attend(self, mirror: Mirror, num_tokens: int) -> None:
        """Check what all tokens so far read."""
        end = mirror.num_computed + num_tokens
        if mirror.encoder is not None:
            positions = range(len(mirror.encoder.tokens))
            size = self.config.block_size
            stored = [self._slot(mirror.encoder, 0, position)[position % size] for position in positions]
            assert stored == self._encoded(mirror.encoder), "the cross table holds others' keys and values"
        for number, (block_size, window, chunked) in enumerate(self.config.groups):
            if not block_size:
                continue  # states, which `_advance` has checked
            start = max(0, mirror.num_computed - window + 1) if window else 0
            start = max(start, max(range(0, mirror.num_computed + 1, window))) if chunked else start
            # Without a loop over positions, because a simulated worker spends most of its time here.
            first = start // block_size
            blocks = mirror.tables[number][first : -(-end // block_size)]
            assert NO_BLOCK not in blocks, f"positions from {start} on are needed, and a block of theirs was let go of"
            stored = list(chain.from_iterable(self.slots[block][:block_size] for block in blocks))
            stored = stored[start - first * block_size : end - first * block_size]
            needed = mirror.prefixes(end)[start:end]
            if number:
                needed = [prefix + number for prefix in needed]
            assert stored == needed, f"positions {start} to {end - 1} hold others' keys and values"
        mirror.num_computed = end

    def _sample(self, mirror: Mirror, is_late: bool) -> list[int]:
        """The sampled token, after the accepted drafts."""
        num_draft, mirror.num_draft = mirror.num_draft, 0
        draft = mirror.cut(mirror.num_computed - num_draft)
        if is_late:
            mirror.num_computed = len(mirror.tokens) - 1
            return []
        sampled = [mirror.next_token()]
        while draft and draft.pop(0) == sampled[-1]:
            mirror.tokens.append(sampled[-1])
            sampled.append(mirror.next_token())
        mirror.num_computed = len(mirror.tokens)
        mirror.tokens.append(sampled[-1])
        return sampled

    def _write(self, mirror: Mirror, number: int, position: int, prefix: int) -> None:
        """Each group of layers stores other numbers for a prefix."""
        self._slot(mirror, number, position)[position % self.config.groups[number].block_size] = prefix + number

    def _slot(self, mirror: Mirror, number: int, position: int) -> list[int]:
        block = mirror.tables[number][position // self.config.groups[number].block_size]
        assert block != NO_BLOCK, f"position {position} is needed, and its block was let go of"
        return self.slots[block]


def _report(token: int, ranked: list[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs([token, *(t for t, _ in ranked)], [0.0, *(p for _, p in ranked)], 1)
