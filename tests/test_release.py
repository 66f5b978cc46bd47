"""`make release` refuses whatever would make a wrong release, and says what to change."""

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

problems: Callable[..., Any] = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "release.py"))["problems"]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-11-26\n\n- Something is new.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean checkout of version 1.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    person = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True)


def test_a_clean_checkout_with_its_version_in_the_changelog_can_be_released(checkout: Path) -> None:
    assert list(problems("1.2.0", checkout)) == []


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.0", "1.2.0rc1"])
def test_a_version_has_three_numbers(checkout: Path, version: str) -> None:
    (problem,) = problems(version, checkout)
    assert "three numbers" in problem


def test_each_problem_is_named(checkout: Path) -> None:
    git(checkout, "tag", "v1.3.0")
    (checkout / "CHANGELOG.md").write_text(CHANGELOG + "\n## [1.3.0] - 2026-11-27\n")
    assert [problem.split(";")[0] for problem in problems("1.3.0", checkout)] == [
        "the checkout has changes",
        "pyproject.toml has version 1.2.0",
        "CHANGELOG.md says nothing below [1.3.0]",
        "the tag v1.3.0 exists",
    ]
    assert 'CHANGELOG.md has no heading "## [1.4.0] - YYYY-MM-DD"' in problems("1.4.0", checkout)
