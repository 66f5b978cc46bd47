"""A loaded worker stepped by hand, and the smallest scheduler of images: an item is encoded in the step that first
needs it, and kept."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from message_helpers import new_message
from tiny_image_models import Prompt, expand

from pagewire.v1 import scheduler_output_pb2 as pb
from worker_service.execution.worker import load_worker
from worker_service.serving.open_session import OpenSession
from worker_service.settings import WorkerSettings

BLOCK, BLOCKS = 8, 32
"""Tokens of a block, and blocks of each sequence."""
POOL = 4 * BLOCKS
"""Blocks of each group of layers."""


class Asked(NamedTuple):
    """A sequence of the worker."""

    sequence_id: int
    message: pb.NewSequence
    """With all data."""


class ImageWorker:
    def __init__(self, path: Path, **settings: Any) -> None:
        sizes = {"block_size": BLOCK, "num_gpu_blocks_override": 4 * POOL, "threads": 1, "forms": False}
        self.worker = load_worker(WorkerSettings(**{"model": str(path), "encoder_budget": 4096} | sizes | settings))
        assert self.worker.limits.images is not None
        self.layouts = self.worker.limits.images
        self._epoch = 0
        self.begin()

    def begin(self) -> None:
        """Open a session."""
        self._epoch += 1
        self.opened = OpenSession(self.worker, self._epoch)
        self.step_id = 0
        self.encoded: set[tuple[bytes, int]] = set()
        self._sent: set[bytes] = set()

    def ask(
        self, sequence_id: int, prompt: Prompt, num_computed: int = 0, first_block: int | None = None, **sampling: Any
    ) -> Asked:
        token_ids, pictures = expand(prompt, self.layouts)
        begin = sequence_id * BLOCKS if first_block is None else first_block
        limits = self.worker.limits
        counts = [1 if limits.has_states(group) else BLOCKS for group in range(len(limits.block_sizes))]
        tables = [range(begin + POOL * group, begin + POOL * group + count) for group, count in enumerate(counts)]
        message = new_message(sequence_id, token_ids, tables[0], num_computed, **sampling)
        for table in tables[1:]:
            message.further_tables.add(block_ids=table)
        for start, one in pictures:
            layout = self.layouts.among(len(pictures), one.width, one.height)
            for part, (first, stop) in enumerate(layout.parts, layout.first_part):
                image = pb.ImagePart(width=one.width, height=one.height, part=part)
                digest = hashlib.sha256(one.data).digest()
                message.items.add(
                    digest=digest, start=start + first, num_embeddings=stop - first, data=one.data, image=image
                )
        return Asked(sequence_id, message)

    def step(
        self, new: Sequence[Asked], scheduled: Sequence[tuple[Asked, int, int, bool]], **output: Any
    ) -> pb.ModelOutput:
        """Compute tokens [start, stop) of each sequence, in one step. new: the sequences that begin."""
        self.step_id += 1
        for one in new:
            for item in one.message.items:
                if item.digest in self._sent:
                    item.ClearField("data")
                self._sent.add(item.digest)
        to_encode = output.pop("items_to_encode", None)
        if to_encode is None:
            to_encode = []
            for asked, start, stop, _ in scheduled:
                for item in asked.message.items:
                    key = item.digest, item.image.part
                    touches = item.HasField("image") and item.start < stop and item.start + item.num_embeddings > start
                    if touches and key not in self.encoded:
                        self.encoded.add(key)
                        to_encode.append(pb.EncoderItem(digest=key[0], part=key[1]))
        message = pb.SchedulerOutput(
            epoch=self._epoch,
            step_id=self.step_id,
            new_sequences=[one.message for one in new],
            sequence_ids=[one.sequence_id for one, *_ in scheduled],
            num_scheduled_tokens=[stop - start for _, start, stop, _ in scheduled],
            samples=[samples for *_, samples in scheduled],
            items_to_encode=to_encode,
            **output,
        )
        self.opened.prepare(message)
        answer = self.opened.compute(message)
        return answer if isinstance(answer, pb.ModelOutput) else answer.finish()

    def end(self, asked: Asked, stop: int) -> int:
        """The end of a chunk, or of the image that it may not end inside."""
        ends = {item.start: item.start + item.num_embeddings for item in asked.message.items}
        cut = [end for start, end in ends.items() if self.layouts.attends_both_ways and start < stop < end]
        return max([stop, *cut])

    def generate(self, asked: Sequence[Asked], count: int, chunk: int = 4096) -> dict[int, list[int]]:
        """`count` tokens of each sequence, together, with chunks of the prompts."""
        known = {one.sequence_id: len(one.message.token_ids) for one in asked}
        computed = {one.sequence_id: one.message.num_computed_tokens for one in asked}
        found: dict[int, list[int]] = {one.sequence_id: [] for one in asked}
        new: Sequence[Asked] = asked
        while scheduled := [
            (one, start := computed[one.sequence_id], self.end(one, min(known[one.sequence_id], start + chunk)))
            for one in asked
            if len(found[one.sequence_id]) < count
        ]:
            answer = self.step(new, [(*each, each[2] == known[each[0].sequence_id]) for each in scheduled])
            assert not answer.failed_sequence_ids
            new, tokens = (), iter(answer.token_ids)
            for one, _, stop in scheduled:
                computed[one.sequence_id] = stop
                if stop == known[one.sequence_id]:
                    found[one.sequence_id].append(next(tokens))
                    known[one.sequence_id] += 1
        return found
