"""Which package may import which: pyproject.toml has the rules."""

from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports


def test_no_import_makes_a_circle_or_leads_upward() -> None:
    rules = Path(__file__).parents[1] / "pyproject.toml"
    assert lint_imports(str(rules), no_cache=True, no_logo=True) == EXIT_STATUS_SUCCESS
