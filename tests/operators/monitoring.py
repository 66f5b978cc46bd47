"""deploy/monitoring: Grafana's schema, promtool's checks, and every query on a Prometheus that scrapes services."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from kustomize import KUBERNETES
from ports import free_address

from pagewire_client import LocalServer

FOLDER = KUBERNETES.parent / "monitoring"
DASHBOARD = FOLDER / "grafana/dashboards/pagewire.json"
WINDOW = 20
"""Seconds of the rates' windows. Prometheus scrapes every second."""
LOAD_SECONDS = 40
FAILED = 'finished_reason="error"'
"""A selector that a run without failures leaves empty."""


def lost_by_grafana() -> str:
    """What Grafana's own classes do not read, or read otherwise, of the dashboard. Nothing if it is as they want it."""
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    ours = json.loads(DASHBOARD.read_text())
    read = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(ours)))
    return "\n".join(_lost(ours, read, ""))


def _lost(ours: Any, read: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(read, dict):
        for name, value in ours.items():
            if name in read:
                yield from _lost(value, read[name], f"{place}.{name}")
            else:
                yield f"{place}.{name} is no field"
    elif isinstance(ours, list) and isinstance(read, list) and len(ours) == len(read):
        for number, pair in enumerate(zip(ours, read, strict=True)):
            yield from _lost(*pair, f"{place}[{number}]")
    elif ours != read:
        yield f"{place} is read as {read!r}"


def refused_by_promtool(promtool: Path, url: str) -> str:
    """Errors of promtool in the rules, their tests, and the metrics of a service."""
    metrics = urllib.request.urlopen(url).read()
    commands = (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"], ["check", "metrics"])
    for command in commands:
        done = subprocess.run([promtool, *command], cwd=FOLDER, input=metrics, capture_output=True)
        if done.returncode:
            return (done.stdout + done.stderr).decode()
    return ""


def queries() -> dict[str, str]:
    """Of every panel, and every series of the rules, by the place in which they are."""
    found = {}
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']}, {target['legendFormat']}"] = target["expr"]
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        for selector in _selectors(promql.parse(rule["expr"])):
            found[f"{rule.get('alert', rule.get('record'))}, {selector}"] = selector
    return {
        place: query.replace("$__rate_interval", f"{WINDOW}s").replace("$tenant", ".*")
        for place, query in found.items()
    }


def _selectors(expression: Any) -> Iterator[str]:
    """The series that an expression reads. Offsets are left out, because a short run has no older samples."""
    if isinstance(expression, promql.VectorSelector):
        yield re.sub(r" offset \w+", "", str(expression))
    for name in ("lhs", "rhs", "vector_selector", "expr"):
        if (part := getattr(expression, name, None)) is not None:
            yield from _selectors(part)
    for argument in getattr(expression, "args", []):
        yield from _selectors(argument)


@contextmanager
def served() -> Iterator[tuple[LocalServer, dict[str, str]]]:
    """The default model, and the addresses of the services' metrics by Prometheus' jobs."""
    jobs = {"pagewire-scheduler": free_address(), "pagewire-worker": free_address()}
    scheduler, worker = (["--metrics-listen", address] for address in jobs.values())
    with LocalServer(scheduler_arguments=scheduler, worker_arguments=worker) as server:
        yield server, jobs


@contextmanager
def scraped(prometheus: Path, jobs: dict[str, str], folder: Path) -> Iterator[str]:
    """The address of a Prometheus with our rules that scrapes the jobs every second."""
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in jobs.items()
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    address = free_address()
    store = f"--storage.tsdb.path={folder / 'series'}"
    command = [prometheus, f"--config.file={file}", store, f"--web.listen-address={address}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def load(server: LocalServer) -> None:
    """Two chats at a time, for long enough that every rate has a window."""
    end = time.monotonic() + LOAD_SECONDS

    def chats(question: str) -> None:
        while time.monotonic() < end:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
            headers = {"content-type": "application/json"}
            url = f"{server.http_url}/v1/chat/completions"
            urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120).read()

    with ThreadPoolExecutor() as pool:
        list(pool.map(chats, ["Count to five.", "Count to ten."]))


def empty(url: str) -> str:
    """The queries that return nothing, NaN alone or an error, in words."""
    return "\n".join(f"{place}: {why}" for place, query in queries().items() if (why := _missing(url, query)))


def _missing(url: str, query: str) -> str:
    if FAILED in query:
        return ""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as answer:
            result = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        return f"{query} is refused: {error.read().decode()}"
    if not result:
        return f"{query} returns nothing"
    return f"{query} returns no number" if all(series["value"][1] == "NaN" for series in result) else ""


def unhealthy_rules(url: str) -> str:
    with urllib.request.urlopen(f"{url}/api/v1/rules") as answer:
        (group,) = json.load(answer)["data"]["groups"]
    return "\n".join(f"{rule['name']}: {rule['lastError']}" for rule in group["rules"] if rule["health"] != "ok")


def firing(url: str) -> str:
    """Alerts that fire or are about to, though nothing is wrong."""
    with urllib.request.urlopen(f"{url}/api/v1/alerts") as answer:
        return ", ".join(
            re.sub(r"^Pagewire", "", one["labels"]["alertname"]) for one in json.load(answer)["data"]["alerts"]
        )
