"""What an encoder reads: its identity, and how long it is kept."""

import gc
import sys

from scheduler_service.core import EncoderInput, SamplingParams, SequenceGroup
from scheduler_service.core.blocks.keys import root_behind


def test_equal_inputs_are_known_by_equal_digests_and_others_by_others() -> None:
    inputs = [
        EncoderInput(num_tokens=3, token_ids=[1, 2, 3]),
        EncoderInput(num_tokens=3, token_ids=[1, 2, 4]),
        EncoderInput(num_tokens=3, features=b"abc"),
        EncoderInput(num_tokens=3, features=b"abd"),
    ]
    assert len({one.digest for one in inputs}) == len({root_behind(b"", one) for one in inputs}) == 4
    assert inputs[0].digest == EncoderInput(num_tokens=3, token_ids=(1, 2, 3)).digest
    assert root_behind(b"salt", inputs[0]) != root_behind(b"", inputs[0])
    assert root_behind(b"salt", None) == b"salt"


def test_features_of_a_group_that_is_disbanded_are_freed_at_once() -> None:
    features = bytes(1000)
    gc.disable()
    try:
        before = sys.getrefcount(features)
        group = SequenceGroup(
            "a", [1], SamplingParams(max_tokens=1), encoder_input=EncoderInput(num_tokens=5, features=features)
        )
        group.disband()
        del group
        assert sys.getrefcount(features) == before
    finally:
        gc.enable()
