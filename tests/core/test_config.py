"""Configurations that cannot work."""

import pytest
from scheduler_helpers import make_scheduler

from scheduler_service.core import PhaseRule
from scheduler_service.core.config import LayerGroup


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("num_device_blocks", -1),
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("delay_factor", float("inf")),
        ("delay_factor", -1.0),
        ("num_host_blocks", -1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("max_num_batched_tokens", 7),
        ("num_lookahead_slots", 64),
        ("num_lookahead_slots", -1),
        ("sliding_window", -1),
        ("max_loras", 0),
        ("max_prefill_chunk", -1),
    ],
)
def test_impossible_configurations_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        make_scheduler(**{field: value})


def test_a_delay_is_for_separate_phases_only() -> None:
    assert make_scheduler(delay_factor=2.0, phase_rule=PhaseRule.SEPARATE).config.delay_factor == 2.0
    with pytest.raises(ValueError, match=r"delay_factor is 2.0; with chunked phases it must be 0"):
        make_scheduler(delay_factor=2.0)


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8; it must be at least block_size \(16\)"):
        make_scheduler(max_num_batched_tokens=8, block_size=16)


def test_a_pool_without_a_block_for_each_group_of_layers_is_refused() -> None:
    groups = LayerGroup(4), LayerGroup(4, window=3)
    with pytest.raises(ValueError, match="num_device_blocks is 1; no token fits into 2 groups of layers"):
        make_scheduler(num_device_blocks=1, layer_groups=groups)
    assert make_scheduler(num_device_blocks=2, layer_groups=groups).config.max_sequence_tokens == 4


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"layer_groups": (LayerGroup(0), LayerGroup(4))}, "layer_groups has another order than full, window, states"),
        ({"layer_groups": (LayerGroup(4), LayerGroup(0, window=3))}, "layer_groups has states with a window of 3"),
        (
            {"block_size": 257, "max_num_batched_tokens": 300, "layer_groups": (LayerGroup(1),)},
            r"a block of 1 tokens; block_size \(257\) may be at most 256 of them",
        ),
        ({"layer_groups": (LayerGroup(0),), "num_lookahead_slots": 1}, "num_lookahead_slots is 1; with states it must"),
    ],
)
def test_groups_with_states_that_contradict_themselves_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_scheduler(**wrong)
