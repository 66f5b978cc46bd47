"""How many tokens each sequence of a group computes in a step, before all others had their turn."""

from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.planning.session import Session
from scheduler_service.core.planning.step import Chunk, Step
from scheduler_service.core.planning.step_bytes import bytes_to_tell


class ChunkSizes:
    """Bounds a chunk by the step's tokens and bytes, and by `max_chunk` while others want a share of the step."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self.max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._is_separate = config.phase_rule is PhaseRule.SEPARATE
        self._is_encoder = config.is_encoder
        self._blocks = session.blocks

    def of(self, group: SequenceGroup, step: Step) -> list[Chunk]:
        """The chunks that fit the step now; nothing is taken of it yet.

        Each long chunk takes half as many tokens as the one before it, the first `max_chunk` of them. So all of them
        together leave room in the step for what is shorter, however many there are. A follower has no table before its
        leader's prompt is done. What the group's encoder reads comes first, and whole; nothing else does before it.
        """
        num_tokens_left, num_bytes_left, num_long = step.budget.num_tokens, step.budget.num_bytes, step.num_long
        chunks: list[Chunk] = []
        encoder, encoder_bytes = group.encoder, 0
        if encoder is not None:
            if not encoder.num_known_blocks:
                encoder_bytes = bytes_to_tell(encoder, len(self._blocks.tables[encoder.id]))
            if not encoder.is_computed:
                has_room = encoder.num_prompt_tokens <= step.budget.num_encoder_tokens
                if not has_room or (encoder_bytes and num_bytes_left <= 0):
                    return []
                chunks.append(Chunk(encoder, encoder.num_prompt_tokens, encoder_bytes))
                num_bytes_left, encoder_bytes = num_bytes_left - encoder_bytes, 0
        for sequence in self._due(group):
            num_tokens = sequence.num_uncomputed_tokens
            is_long = num_tokens > self.max_chunk and not self._is_encoder
            if is_long:
                num_tokens = max(1, self.max_chunk >> num_long)
            if not self._is_encoder:
                num_tokens = min(num_tokens, num_tokens_left)
            elif num_tokens > num_tokens_left:
                continue
            if num_tokens and sequence.id in self._blocks.tables:
                num_bytes = 0
                if not sequence.num_known_blocks:
                    if num_bytes_left <= 0:
                        continue
                    num_entries = self._blocks.num_table_entries(sequence, num_tokens)
                    num_bytes = encoder_bytes + bytes_to_tell(sequence, num_entries)
                    encoder_bytes = 0
                    num_bytes_left -= num_bytes
                chunks.append(Chunk(sequence, num_tokens, num_bytes, is_long=is_long))
                num_long += is_long
                num_tokens_left -= num_tokens
        return chunks

    def _due(self, group: SequenceGroup) -> list[Sequence]:
        """The live sequences; with separate phases those that are behind first, so that none decodes among them."""
        live = group.live
        if not self._is_separate or len(live) == 1:
            return live
        return [s for s in live if s.num_uncomputed_tokens > 1 and s.id in self._blocks.tables] or live
