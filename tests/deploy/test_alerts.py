"""The alerts fire when they should: as Prometheus' own promtool computes them from made-up series."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, which comes with Prometheus, is not installed")
def test_every_alert_fires_and_ends_as_promtool_computes_it() -> None:
    result = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=FOLDER, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    fires: dict[str, set[bool]] = {rule["alert"]: set() for rule in group["rules"] if "alert" in rule}
    for test in yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            fires[case["alertname"]].add(bool(case.get("exp_alerts")))
    assert set(map(frozenset, fires.values())) == {frozenset({True, False})}
