"""A session keeps the items that the scheduler sends, and no sequence reads an item that it was not given."""

from dataclasses import replace

import pytest
import torch
from worker_helpers import LIMITS, embeddings_item, new_sequence, tokens

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_client import PromptEmbeds
from worker_service.errors import InvalidStepError
from worker_service.serving.codec.items import decode_items
from worker_service.session.items import PromptItem
from worker_service.session.session import Session
from worker_service.session.step import Fork, NewSequence, SchedulerOutput

ITEM = embeddings_item(torch.ones(2, 8), 1)
KNOWN = ITEM._replace(embeddings=None)
WITH_EMBEDS = replace(LIMITS, prompt_embeds_size=8)


def apply(session: Session, step_id: int, *new: NewSequence, **output: object) -> None:
    session.apply(SchedulerOutput(1, step_id, new_sequences=new, **output))  # type: ignore[arg-type]


def test_an_item_that_came_once_is_given_to_later_sequences_and_forks_until_it_is_dropped() -> None:
    session = Session(1, LIMITS)
    apply(session, 1, new_sequence(1, range(5), range(4), items=(ITEM,)))
    fork = Fork(2, 3, 5, 0, tokens([4]), 1)
    apply(session, 2, new_sequence(2, range(5), range(4), items=(KNOWN,)), forks=(fork,), preempted=(1,))
    assert [one.items for one in session.sequences.values()] == [(ITEM,)] * 2
    with pytest.raises(InvalidStepError, match="sequence 4: item at token 1 came without its data"):
        apply(session, 3, new_sequence(4, range(5), range(4), items=(KNOWN,)), dropped_items=(ITEM.digest,))


@pytest.mark.parametrize("num_computed", [3, 4])
def test_an_item_among_the_computed_tokens_needs_no_data(num_computed: int) -> None:
    session = Session(1, LIMITS)
    apply(session, 1, new_sequence(1, range(5), range(4), num_computed, items=(KNOWN,)))
    assert session.sequences[1].items == (KNOWN,)
    with pytest.raises(InvalidStepError, match="without its data"):  # the last prompt token may be computed again
        apply(session, 2, new_sequence(2, range(3), range(4), 3, items=(KNOWN,)))


def test_an_item_of_another_size_under_a_known_digest_is_refused() -> None:
    session = Session(1, LIMITS)
    apply(session, 1, new_sequence(1, range(5), range(4), items=(ITEM,)))
    with pytest.raises(InvalidStepError, match="without its data"):
        apply(session, 2, new_sequence(2, range(5), range(4), items=(KNOWN._replace(stop=5),)))


def decode(*items: pb.PromptItem, limits: object = WITH_EMBEDS) -> tuple[PromptItem, ...]:
    return decode_items("here", pb.NewSequence(num_prompt_tokens=9, items=items), limits)  # type: ignore[arg-type]


def test_items_are_decoded_with_their_embeddings() -> None:
    given = torch.randn(3, 8, dtype=torch.bfloat16)
    item = pb.PromptItem(digest=b"d", start=2, num_embeddings=3, data=PromptEmbeds.of(given).data)
    (found,) = decode(item)
    assert (found.digest, found.start, found.stop) == (b"d", 2, 5)
    assert found.embeddings is not None
    read = torch.frombuffer(bytearray(found.embeddings.data), dtype=torch.bfloat16)
    assert (found.embeddings.dtype, found.embeddings.row_bytes) == ("BF16", 16)
    assert torch.equal(read.view(3, 8), given)


DATA = PromptEmbeds.of(torch.zeros(3, 8)).data


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (pb.PromptItem(start=7, num_embeddings=3, data=DATA), "ends at token 10, between token 0 and the prompt's 9"),
        (pb.PromptItem(start=7, num_embeddings=0), "ends at token 7"),
        (pb.PromptItem(num_embeddings=4, data=DATA), r"has the shape \(3, 8\) instead of \(4, 8\)"),
        (pb.PromptItem(num_embeddings=3, data=DATA[:-1]), "bytes after its header"),
        (pb.PromptItem(num_embeddings=3, data=b"PK\x03\x04"), "is a pickle"),
    ],
    ids=str,
)
def test_an_item_that_contradicts_itself_or_the_model_is_refused(item: pb.PromptItem, reason: str) -> None:
    with pytest.raises(InvalidStepError, match=reason):
        decode(item)


def test_overlapping_items_and_items_for_another_model_are_refused() -> None:
    with pytest.raises(InvalidStepError, match="between token 3 and"):
        decode(pb.PromptItem(num_embeddings=3, data=DATA), pb.PromptItem(start=2, num_embeddings=3, data=DATA))
    with pytest.raises(InvalidStepError, match="this worker's model reads no embeddings"):
        decode(pb.PromptItem(num_embeddings=3, data=DATA), limits=LIMITS)
