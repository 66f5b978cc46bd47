"""The items of prompts that a session has, by digest. The scheduler says when to drop an item, and sends it again
only after that."""

from collections.abc import Iterable

from worker_service.errors import InvalidStepError
from worker_service.session.step import Embeddings, NewSequence, PromptItem


class SessionItems:
    def __init__(self) -> None:
        self._known: dict[bytes, Embeddings] = {}

    def drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._known.pop(digest, None)

    def take(self, new: NewSequence) -> tuple[PromptItem, ...]:
        """The items of a new sequence, with the embeddings that its steps or those of its forks may read.

        The last prompt token may be computed again: by a fork, or by a late sequence. Raises InvalidStepError if the
        session lacks an item that is needed."""
        found = []
        for item in new.items:
            if item.embeddings is not None:
                self._known[item.digest] = item.embeddings
            embeddings = self._known.get(item.digest)
            is_needed = item.stop > min(new.num_computed_tokens, new.num_prompt_tokens - 1)
            if is_needed and (embeddings is None or embeddings.num_embeddings != item.stop - item.start):
                raise InvalidStepError(f"sequence {new.sequence_id}: item at token {item.start} came without its data")
            found.append(item._replace(embeddings=embeddings))
        return tuple(found)
