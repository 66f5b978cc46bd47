"""The decisions of one planned step, each with its reason, in words."""

from collections.abc import Iterable, Iterator, Mapping

from scheduler_service.core import PlacementReason, Scheduler, SchedulerOutput, SequenceGroup
from scheduler_service.view.words import PLACED, many, name_of, shortened, why_left, why_waits

MAX_PREFILLS = 8
"""Prompts under way that are named in one step."""
Counts = tuple[int, int]
"""A group's preemptions by swap and by recompute."""


def counts_of(group: SequenceGroup) -> Counts:
    return group.history.num_swaps, group.history.num_recomputes


def decisions(
    scheduler: Scheduler,
    output: SchedulerOutput,
    before: Mapping[SequenceGroup, Counts],
    schedulers: Iterable[Scheduler],
) -> list[str]:
    """`before`: the groups that ran on this worker before the step. `schedulers`: of all workers."""
    sentences = [
        *_preemptions(output, before),
        *_swaps_and_copies(output),
        *_placements(output),
        *_chunks(output),
        *_departures(output),
        *(f"{name_of(group)} is refused: {group.error}" for group in output.ignored),
    ]
    if len(waiting := scheduler.waiting):
        (head,) = waiting.upcoming(1)[:1] or (waiting.head,)
        behind = f"; {many(waiting_behind, 'request')} behind it" if (waiting_behind := len(waiting) - 1) else ""
        sentences.append(f"{name_of(head)} waits: {why_waits(head, schedulers)}{behind}")
    return shortened(sentences)


def _preemptions(output: SchedulerOutput, before: Mapping[SequenceGroup, Counts]) -> Iterator[str]:
    taken = [placement.group for placement in output.placements if placement.to is None]
    reason = "no block was free for the requests that run, and it ranks last"
    if taken:
        reason = f"{name_of(taken[0])} goes before it and needs its room"
    moved = {placement.group for placement in output.moved}
    for group, counts in before.items():
        swaps, recomputes = counts_of(group)
        if group in moved:
            yield f"{name_of(group)} returns to the queue: another worker has room for it"
        elif swaps > counts[0]:
            yield f"{name_of(group)} is preempted, and its blocks are swapped to the host: {reason}"
        elif recomputes > counts[1]:
            yield f"{name_of(group)} is preempted, to be computed again: {reason}"


def _swaps_and_copies(output: SchedulerOutput) -> Iterator[str]:
    if output.blocks_to_swap_out:
        yield f"the swap copies {many(len(output.blocks_to_swap_out), 'block')} to the host, before they are reused"
    if output.blocks_to_swap_in:
        yield f"the swap copies {many(len(output.blocks_to_swap_in), 'block')} of resumed requests back from the host"
    for source, target in output.blocks_to_copy[:4]:
        yield f"block {source} is copied to {target}: several sequences hold it, and one of them writes (copy on write)"
    if len(output.blocks_to_copy) > 4:
        yield f"more copies of shared blocks: {len(output.blocks_to_copy) - 4}"
    for fork in output.forks[:4]:
        blocks = many(len(fork.block_ids), "block")
        yield f"output {fork.child.index} of {name_of(fork.child.group)} shares {blocks} with an earlier output"


def _placements(output: SchedulerOutput) -> Iterator[str]:
    for placement in output.placements:
        group = placement.group
        if placement.to is not None:
            yield f"{name_of(group)} is left to {placement.to.worker}: {why_left(placement.reason.name)}"
            continue
        cached = f"{placement.cached_tokens} of its {group.num_prompt_tokens} prompt tokens are cached"
        parts = [
            cached if placement.cached_tokens else f"none of its {group.num_prompt_tokens} prompt tokens is cached"
        ]
        if placement.reason is not PlacementReason.ALONE and (why := PLACED.get(placement.reason.name)):
            parts.append(why)
        if placement.num_overtaken:
            parts.append(f"{many(placement.num_overtaken, 'later request')} went before it")
        yield f"{name_of(group)} is admitted: {'; '.join(parts)}"


def _departures(output: SchedulerOutput) -> Iterator[str]:
    if output.finished:
        yield f"the worker forgets {many(len(output.finished), 'sequence')} that ended"
    if output.preempted:
        yield f"the worker forgets {many(len(output.preempted), 'preempted sequence')}"


def _chunks(output: SchedulerOutput) -> Iterator[str]:
    num_decodes, num_named = 0, 0
    rest: dict[SequenceGroup, int] = {}
    for sequence, num_tokens, _ in output.scheduled:
        end, total = sequence.num_computed_tokens - sequence.num_draft_tokens, sequence.num_tokens
        # A step that is planned ahead computes a token which the worker has sampled and the core does not know.
        is_ahead = end > total and not sequence.is_encoder
        if is_ahead or (num_tokens == 1 + output.num_draft_tokens.get(sequence, 0) and sequence.num_output_tokens):
            num_decodes += 1
            continue
        if num_named == MAX_PREFILLS:
            rest[sequence.group] = rest.get(sequence.group, 0) + num_tokens
            continue
        num_named += 1
        what = "encoder tokens" if sequence.is_encoder else "tokens"
        left = "" if end >= total else f"; {total - end} are left, because the step has no more room"
        yield f"{name_of(sequence.group)} computes {what} {end - num_tokens} to {end} of {total}{left}"
    if rest:
        yield f"{sum(rest.values())} prompt tokens are computed for {many(len(rest), 'more request')}"
    if num_decodes:
        yield f"one token is computed for each of {many(num_decodes, 'decoding sequence')}"
