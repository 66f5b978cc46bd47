"""The pages of docs/reference are made from the code, and docs/operate has all that is deployed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from reference_tables import FOLDER, PAGES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_as_the_code_has_it(name: str) -> None:
    """`python tests/reference_tables.py` writes the pages."""
    assert (FOLDER / f"{name}.md").read_text() == PAGES[name]()


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())["groups"]
    text = (ROOT / "docs/operate/alerts.md").read_text()
    assert {rule["alert"] for rule in group["rules"] if "alert" in rule} == set(re.findall(r"^## (\w+)$", text, re.M))


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    def pages(entry: Any) -> set[str]:
        parts = entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ()
        return {entry} if isinstance(entry, str) else set().union(*map(pages, parts))

    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    outside = {name.removeprefix("repository/") for name in nav if name.startswith("repository/")}
    assert all((ROOT / name).is_file() for name in outside)
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert nav - {f"repository/{name}" for name in outside} == docs
