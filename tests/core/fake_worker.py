"""A worker without a model: it stores in every KV slot a hash of the prefix that belongs there.

It knows only what a SchedulerOutput tells it, and checks before each "attention" that every slot it would read holds
the right prefix. The token it samples is a function of the prefix, so the right output of a request is known.
"""

from dataclasses import dataclass, field

from scheduler_service.core import ModelOutput, SchedulerConfig, SchedulerOutput, SequenceGroup

VOCABULARY = 50


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return (prefix * 1_000_003 + token + 1) & 0xFFFFFFFFFFFF


def sample(prefix: int, index: int) -> int:
    return (prefix ^ (prefix >> 17)) * (2 * index + 3) % VOCABULARY


def reference_output(group: SequenceGroup, index: int, max_sequence_tokens: int) -> list[int]:
    """What one output of a request is, computed alone and obviously."""
    prefix = 0
    sequence, sampling = group.sequences[index], group.sampling
    for token in sequence.token_ids[: sequence.num_prompt_tokens]:
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
    table: list[int]
    index: int
    num_computed: int


@dataclass
class FakeWorker:
    config: SchedulerConfig
    mirrors: dict[int, Mirror] = field(default_factory=dict)
    last_step: int = 0

    def __post_init__(self) -> None:
        empty = [-1] * self.config.block_size
        self.slots: list[list[int]] = [list(empty) for _ in range(self.config.num_device_blocks)]
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
        for source, destination in output.blocks_to_copy:
            self.slots[destination] = list(self.slots[source])
        for sequence, table, num_computed in output.new_sequences:
            assert sequence.id not in self.mirrors, "a known sequence was sent as new"
            self.mirrors[sequence.id] = Mirror(list(sequence.token_ids), list(table), sequence.index, num_computed)
        for parent_id, child, table, num_computed in output.forks:
            assert child.id not in self.mirrors, "a known sequence was forked"
            tokens = self.mirrors[parent_id].tokens[: child.num_prompt_tokens]
            self.mirrors[child.id] = Mirror(tokens, list(table), child.index, num_computed)
        for update in output.block_table_updates:
            table = self.mirrors[update.sequence_id].table
            assert update.start <= len(table)
            table[update.start :] = update.block_ids
        for sequence_id in output.finished:
            del self.mirrors[sequence_id]
        # All keys and values of a step are written before any are read.
        for sequence, num_tokens, samples in output.scheduled:
            self._store(self.mirrors[sequence.id], num_tokens, samples)
        sampled = [
            self._attend(self.mirrors[sequence.id], num_tokens, samples)
            for sequence, num_tokens, samples in output.scheduled
        ]
        return ModelOutput(output.step_id, [token for token in sampled if token is not None])

    def _store(self, mirror: Mirror, num_tokens: int, samples: bool) -> None:
        end = mirror.num_computed + num_tokens
        assert end <= len(mirror.tokens)
        assert samples == (end == len(mirror.tokens))
        assert end <= len(mirror.table) * self.config.block_size, "the block table is too short for the chunk"
        for position, prefix in enumerate(self._prefixes(mirror, end)):
            if position >= mirror.num_computed:
                self._slot(mirror, position)[position % self.config.block_size] = prefix

    def _attend(self, mirror: Mirror, num_tokens: int, samples: bool) -> int | None:
        end = mirror.num_computed + num_tokens
        prefix = 0
        for position, prefix in enumerate(self._prefixes(mirror, end)):
            stored = self._slot(mirror, position)[position % self.config.block_size]
            assert stored == prefix, f"position {position} holds another prefix's keys and values"
        mirror.num_computed = end
        if not samples:
            return None
        mirror.tokens.append(sample(prefix, mirror.index))
        return mirror.tokens[-1]

    def _prefixes(self, mirror: Mirror, end: int) -> list[int]:
        prefixes, prefix = [], 0
        for token in mirror.tokens[:end]:
            prefix = extend(prefix, token)
            prefixes.append(prefix)
        return prefixes

    def _slot(self, mirror: Mirror, position: int) -> list[int]:
        return self.slots[mirror.table[position // self.config.block_size]]
