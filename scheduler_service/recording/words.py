"""The differences between two plans of one step, in words."""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from pagewire.v1 import scheduler_output_pb2 as wire

MAX_ITEMS = 8


def compare_steps(recorded: wire.SchedulerOutput | None, replayed: wire.SchedulerOutput | None) -> str:
    """Each field that differs, from its first different item."""
    if recorded is None or replayed is None:
        return f"recorded: {_summary(recorded)}; replayed: {_summary(replayed)}"
    parts: list[str] = []
    for name, items in PARTS.items():
        ours, theirs = items(recorded), items(replayed)
        if ours != theirs:
            same = next(
                (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)),
            )
            parts.append(f"{name}: recorded {_list(ours, same)}; replayed {_list(theirs, same)}")
    return "\n  ".join(["the plans differ", *parts])


def _summary(step: wire.SchedulerOutput | None) -> str:
    if step is None:
        return "nothing to do"
    return "; ".join(f"{name} {_list(items(step), 0)}" for name, items in PARTS.items() if items(step))


def _list(items: Sequence[str], first: int) -> str:
    shown = list(items[first : first + MAX_ITEMS])
    before = [f"(the same {first})"] if first else []
    after = [f"(and {len(items) - first - MAX_ITEMS} more)"] if len(items) > first + MAX_ITEMS else []
    return ", ".join([*before, *shown, *after]) or "nothing"


def _tokens(token_ids: Sequence[int]) -> str:
    """Number and checksum: prompts must stay private, and a user may pass on the output."""
    return f"{len(token_ids)} tokens (checksum {zlib.crc32(array('I', token_ids).tobytes()):08x})"


def _blocks(block_ids: Sequence[int]) -> str:
    return f"blocks {' '.join(map(str, block_ids))}" if block_ids else "no blocks"


def _scheduled(step: wire.SchedulerOutput) -> list[str]:
    count = len(step.sequence_ids)
    num_tokens = step.num_scheduled_tokens or [1] * count
    samples = step.samples or [True] * count
    return [
        f"{tokens} of {sequence_id}{'' if samples else ' without sampling'}"
        for sequence_id, tokens, samples in zip(step.sequence_ids, num_tokens, samples, strict=False)
    ]


def _tables(message: wire.NewSequence | wire.Fork) -> str:
    return ", ".join(_blocks(table.block_ids) for table in (message, *message.further_tables))


def _names(items: Iterable[wire.EncoderItem]) -> list[str]:
    return [f"part {item.part} of {item.digest.hex()[:8]}" for item in items]


def _pairs(mapping: wire.BlockMapping) -> list[str]:
    return [f"{source} to {to}" for source, to in zip(mapping.sources, mapping.destinations, strict=False)]


PARTS: dict[str, Callable[[wire.SchedulerOutput], list[str]]] = {
    "epoch and step": lambda step: [f"{step.epoch}, {step.step_id}"],
    "computes tokens": _scheduled,
    "new sequences": lambda step: [
        f"{new.sequence_id} ({_tokens(new.token_ids)}, {new.num_prompt_tokens} of them prompt, "
        f"{new.num_computed_tokens} computed; {_tables(new)})"
        for new in step.new_sequences
    ],
    "adapters of new sequences": lambda step: [
        f"{new.sequence_id}: {new.adapter_id}" for new in step.new_sequences if new.adapter_id
    ],
    "items of new sequences": lambda step: [
        f"{new.sequence_id}: {item.digest.hex()[:8]} in place of {item.num_embeddings} tokens from {item.start}, "
        f"{item.num_bytes} bytes sent" + (f", part {item.image.part} of an image" if item.HasField("image") else "")
        for new in step.new_sequences
        for item in new.items
    ],
    "drops items": lambda step: [digest.hex()[:8] for digest in step.dropped_items],
    "encodes": lambda step: _names(step.items_to_encode),
    "drops encoded": lambda step: _names(step.dropped_embeddings),
    "prepares": lambda step: _names(step.images_ahead),
    "sampling of new sequences": lambda step: [
        f"{new.sequence_id}: {str(new.sampling).replace(chr(10), ' ')}" for new in step.new_sequences
    ],
    "forks": lambda step: [
        f"{fork.child_sequence_id} as output {fork.index} of {fork.parent_sequence_id} ({fork.num_tokens} of its "
        f"tokens and {_tokens(fork.token_ids)} of its own, {fork.num_computed_tokens} computed; "
        f"{_tables(fork)})"
        for fork in step.forks
    ],
    "block tables": lambda step: [
        f"{update.sequence_id} from {update.start}: {_blocks(update.block_ids)}"
        + (f" of layer group {update.layer_group}" if update.layer_group else "")
        for update in step.block_table_updates
    ],
    "swaps out blocks": lambda step: _pairs(step.blocks_to_swap_out),
    "swaps in blocks": lambda step: _pairs(step.blocks_to_swap_in),
    "copies blocks": lambda step: _pairs(step.blocks_to_copy),
    "forgets finished": lambda step: [str(sequence_id) for sequence_id in step.finished],
    "forgets preempted": lambda step: [str(sequence_id) for sequence_id in step.preempted],
    "room for drafts": lambda step: [
        f"{sequence_id}: {number}"
        for sequence_id, number in zip(step.sequence_ids, step.num_draft_tokens, strict=False)
        if number
    ],
}
