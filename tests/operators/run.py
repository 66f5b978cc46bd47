"""Checks deploy/ with other people's programs: kubectl, the operators' schemas, Grafana's schema, Prometheus.

The programs come from package registries, so a network is needed. `make test` does not run this.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import manifests
import monitoring
import programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a folder that keeps the installed programs for the next run")
    given = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as made:
        folder, work = (given or Path(made)).resolve(), Path(made).resolve() / "work"
        for one in (folder, work):
            one.mkdir(parents=True, exist_ok=True)
        results = [_report(what, check) for what, check in _checks(folder, work)]
    sys.exit(not all(results))


def _checks(folder: Path, work: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """What is checked, and a function that says what is wrong, or nothing."""
    yield (
        "kubectl builds every overlay as our renderer does",
        lambda: manifests.differences(programs.kubectl(folder), work),
    )
    yield "the operators' schemas accept their resources", lambda: manifests.refusals(programs.schemas(folder), work)
    programs.grafana(folder)
    yield "Grafana's classes read all of the dashboard", monitoring.lost_by_grafana
    prometheus, promtool = programs.prometheus(folder)
    with monitoring.served() as (server, jobs), monitoring.scraped(prometheus, jobs, work) as url:
        monitoring.load(server)
        metrics = f"http://{jobs['pagewire-scheduler']}/metrics"
        yield "promtool accepts rules and metrics", lambda: monitoring.refused_by_promtool(promtool, metrics)
        yield "every query returns data", lambda: monitoring.empty(url)
        yield "every rule is evaluated", lambda: monitoring.unhealthy_rules(url)
        yield "no alert is active", lambda: monitoring.firing(url)


def _report(what: str, check: Callable[[], str]) -> bool:
    wrong = check()
    print(f"{what:60} {'fail' if wrong else 'pass'}", *wrong.splitlines(), sep="\n  ", flush=True)
    return not wrong


if __name__ == "__main__":
    main()
