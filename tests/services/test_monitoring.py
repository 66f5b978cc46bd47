"""deploy/monitoring: what its alerts and its dashboard ask Prometheus for is what the services have."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fake_worker_service import FakeWorkerService, serving
from prometheus_client.core import Metric
from scheduler_in_process import scheduler

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.operations.metrics import SchedulerMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
OF_PROMETHEUS = {"up": {"job", "instance"}}
OF_THE_CLIENT_LIBRARY = {
    name: {"job", "instance"} for name in ("process_cpu_seconds_total", "process_resident_memory_bytes")
}
VARIABLES = {"$__rate_interval": "1m", "$tenant": ".*"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana" / "dashboards" / "pagewire.json").read_text())


def queries() -> dict[str, str]:
    """By where they are."""
    found = {rule.get("alert", rule.get("record")): rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            found[f"{panel['title']}, {target['legendFormat']}"] = query
    return found


def parts(expression: Any) -> Iterator[Any]:
    """An expression and all within it."""
    yield expression
    match expression:
        case promql.BinaryExpr():
            yield from parts(expression.lhs)
            yield from parts(expression.rhs)
        case promql.Call():
            for argument in expression.args:
                yield from parts(argument)
        case promql.MatrixSelector():
            yield from parts(expression.vector_selector)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            yield from parts(expression.expr)
        case promql.VectorSelector() | promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            raise AssertionError(type(expression))


async def scraped(tokenizer: Path) -> list[Metric]:
    """After a request."""
    async with (
        serving(FakeWorkerService(tokenizer)) as address,
        scheduler(address) as one,
        Client(one.target) as client,
    ):
        await collect(client, "a", SamplingParams(max_tokens=2))
        return await SchedulerMetrics(one.engine.front_ends, lambda: "fake", vllm_names=False).families()


@pytest.fixture(scope="module")
def series(byte_tokenizer_directory: Path) -> dict[str, set[str]]:
    """Names of series, and of the labels of each."""
    found: dict[str, set[str]] = defaultdict(set, OF_PROMETHEUS | OF_THE_CLIENT_LIBRARY)
    for family in asyncio.run(scraped(byte_tokenizer_directory)):
        for sample in family.samples:
            found[sample.name] |= {*sample.labels, "job", "instance"}
    for rule in rules():
        if "record" in rule:
            found[rule["record"]] |= {"worker"}
    return found


@pytest.mark.parametrize("place", queries())
def test_a_query_is_of_series_and_labels_that_there_are(place: str, series: dict[str, set[str]]) -> None:
    names = set()
    for part in parts(promql.parse(queries()[place])):
        if isinstance(part, promql.VectorSelector):
            assert part.name in {*series}  # asking it for what it has not would make it
            names.add(part.name)
            assert {matcher.name for matcher in part.matchers.matchers} <= series[part.name]
    labels = set().union(*(series[name] for name in names))
    for grouped in re.findall(r"by \(([^)]*)\)", queries()[place]):
        assert set(grouped.split(", ")) <= labels


def test_every_metric_of_the_queries_is_described() -> None:
    described = (ROOT / "docs" / "metrics.md").read_text()
    for query in queries().values():
        for name in re.findall(r"pagewire_(\w+)", query):
            base = re.sub(r"_(bucket|sum|count|total)$", "", name)
            assert base in described or base.removeprefix("num_requests") in described, name


def test_compose_has_what_prometheus_and_grafana_are_told_of() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    for job in scraped["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        for name in discovery["names"]:
            assert compose[name]["environment"]["PAGEWIRE_METRICS_LISTEN"] == f"0.0.0.0:{discovery['port']}"
    files = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in compose[name]["volumes"]]
    assert all((ROOT / file).exists() for file in files if file.startswith("./"))
    sources = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/pagewire.yml").read_text())["datasources"]
    for source in sources:
        assert re.fullmatch(r"http://(\w+):\d+", source["url"])[1] in compose  # type: ignore[index]
    used = set(re.findall(r'"uid": "(\w+)"', json.dumps(dashboard()["panels"])))
    assert used <= {source["uid"] for source in sources}
    for name in ("prometheus", "grafana", "jaeger"):
        assert compose[name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in compose[name]["ports"])


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
