"""Decodes block tables and copies of blocks, and checks them against the worker's limits. Functions raise
InvalidStepError."""

from array import array
from collections.abc import Sequence

from pagewire.v1 import scheduler_output_pb2 as pb
from worker_service.errors import InvalidStepError
from worker_service.session.step import TOKENS, BlockMapping, BlockTableUpdate, Limits, Tables


def decode_tables(message: pb.NewSequence | pb.Fork, limits: Limits) -> Tables:
    """The block tables of a sequence in all groups of layers."""
    num_tables = 1 + len(message.further_tables)
    if num_tables != len(limits.block_sizes):
        raise InvalidStepError(
            f"further_tables: {num_tables} block tables of a sequence; the model has {len(limits.block_sizes)} groups "
            "of layers"
        )
    tables = [message.block_ids, *(table.block_ids for table in message.further_tables)]
    for group, table in enumerate(tables):
        if limits.has_states(group) and len(table) != 1:
            raise InvalidStepError(
                f"block_ids: {len(table)} blocks in group {group} of layers, whose states are one block"
            )
    return tuple(decode_block_ids(table, limits) for table in tables)


def decode_table_update(update: pb.BlockTableUpdate, limits: Limits) -> BlockTableUpdate:
    if update.layer_group >= len(limits.block_sizes):
        raise InvalidStepError(
            f"layer_group: {update.layer_group}; the model has {len(limits.block_sizes)} groups of layers"
        )
    if limits.has_states(update.layer_group) and (update.start or len(update.block_ids) != 1):
        raise InvalidStepError(
            f"block_table_updates: {len(update.block_ids)} blocks from entry {update.start} on in group "
            f"{update.layer_group} of layers, whose states are one block"
        )
    return BlockTableUpdate(
        update.sequence_id, update.start, decode_block_ids(update.block_ids, limits), int(update.layer_group)
    )


def decode_block_ids(block_ids: Sequence[int], limits: Limits) -> "array[int]":
    if block_ids and max(block_ids) >= limits.num_device_blocks:
        raise InvalidStepError(
            f"block_ids: block {max(block_ids)} is beyond the pool of {limits.num_device_blocks} device blocks"
        )
    return array(TOKENS, block_ids)


def decode_mapping(where: str, message: pb.BlockMapping, num_sources: int, num_destinations: int) -> BlockMapping:
    sources, destinations = tuple(message.sources), tuple(message.destinations)
    if len(sources) != len(destinations):
        raise InvalidStepError(f"{where}: {len(sources)} sources for {len(destinations)} destinations")
    if len(set(destinations)) != len(destinations):
        raise InvalidStepError(f"{where}: a destination appears twice")
    for name, column, size in (("source", sources, num_sources), ("destination", destinations, num_destinations)):
        if column and max(column) >= size:
            raise InvalidStepError(f"{where}: {name} {max(column)} is beyond the pool of {size} blocks")
    return BlockMapping(sources, destinations)
