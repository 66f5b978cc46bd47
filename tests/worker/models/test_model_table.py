"""The tables of types and of blocks in docs/models.md, which tests/worker/model_sweep.py and state_layouts.py make."""

import json

import pytest
import transformers
from model_sweep import NATIVE, PAGE, REFUSED, THEIRS, TYPES, Outcome, groups_of, read_table, reason_of
from state_layouts import HEAD, MODELS, TABLE, row
from tiny_networks import tiny_config

from worker_service.models.registry import read_config

OUTCOMES = read_table(PAGE.read_text())
REFUSALS = {outcome.reason: outcome for outcome in OUTCOMES.values() if outcome.status == REFUSED}
"""One type for each reason: a type's modules take up to a second to import."""
GROUPS = {outcome.groups: outcome for outcome in OUTCOMES.values() if outcome.status in (NATIVE, THEIRS)}
"""One type for each kind of groups."""


@pytest.fixture(autouse=True)
def _same_transformers() -> None:
    if f"transformers {transformers.__version__}," not in PAGE.read_text():
        pytest.skip("the table is of another version of transformers")


def test_the_table_has_every_causal_type_once() -> None:
    assert sorted(OUTCOMES) == TYPES


@pytest.mark.parametrize("outcome", REFUSALS.values(), ids=lambda outcome: outcome.model_type)
def test_a_refused_type_is_refused_for_the_reason_in_the_table(outcome: Outcome) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole sentence is compared)
        read_config(json.loads(tiny_config(outcome.model_type).to_json_string()))
    assert reason_of(refusal.value) == outcome.reason


@pytest.mark.parametrize("outcome", GROUPS.values(), ids=lambda outcome: outcome.model_type)
def test_the_layers_of_a_type_have_the_groups_in_the_table(outcome: Outcome) -> None:
    config = read_config(json.loads(tiny_config(outcome.model_type).to_json_string()))
    assert groups_of(config) == outcome.groups


BLOCKS = TABLE.search(PAGE.read_text())
ROWS = BLOCKS[2].removeprefix(HEAD).splitlines(keepends=True) if BLOCKS else []


def test_the_table_of_blocks_has_every_model_once() -> None:
    assert [line.split(" | ")[0].removeprefix("| ") for line in ROWS] == [*MODELS]


@pytest.mark.parametrize("model", MODELS)
def test_the_blocks_of_a_published_model_are_those_in_the_table(model: str) -> None:
    """`python tests/worker/state_layouts.py --write` writes the table."""
    assert row(model) in ROWS
