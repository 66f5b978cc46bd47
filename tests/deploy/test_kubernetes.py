"""deploy/kubernetes: accepted by the API's own schemas, and true of the services that it starts."""

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kustomize import (
    EVERY_PEER,
    KUBERNETES,
    PROBES,
    TOGETHER,
    Resource,
    allowed,
    container,
    find,
    is_of_kubernetes,
    read,
    render,
    write_overlay,
)

from pagewire_common.settings import ServiceSettings, load_settings
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.operations.metrics import SchedulerMetrics
from scheduler_service.settings import SchedulerSettings
from worker_service.settings import WorkerSettings

SETTINGS: dict[str, type[ServiceSettings]] = {"scheduler": SchedulerSettings, "worker": WorkerSettings}
OLDEST = "1.30"
"""The first version whose `sleep` before SIGTERM needs no feature gate."""


@pytest.fixture(params=["cpu", "gpu", "cpu with hpa", "cpu with all others", "gpu with all others"], scope="module")
def overlay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, _, components = request.param.partition(" with ")
    if not components:
        return KUBERNETES / name
    folder = tmp_path_factory.mktemp(name)
    return write_overlay(folder, name, *(["hpa"] if components == "hpa" else TOGETHER), namespace="pagewire")


@pytest.fixture(scope="module")
def resources(overlay: Path) -> list[Resource]:
    return render(overlay)


@pytest.fixture(params=sorted(SETTINGS), scope="module")
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deployment(resources: list[Resource], service: str) -> Resource:
    return find(resources, "Deployment", service)


def settings_of(deployment: Resource, resources: list[Resource], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """The settings from a pod's flags and environment; a bad or unknown one ends the test."""
    for name in [name for name in os.environ if name.startswith("PAGEWIRE_")]:
        monkeypatch.delenv(name)
    of_pod = container(deployment)
    for source in (one for one in of_pod["envFrom"] if "configMapRef" in one):
        for name, value in find(resources, "ConfigMap", source["configMapRef"]["name"])["data"].items():
            monkeypatch.setenv(name, value)
    for variable in of_pod.get("env", []):
        monkeypatch.setenv(variable["name"], variable.get("value", "4"))
    name = deployment["metadata"]["name"]
    return load_settings(SETTINGS[name], name, of_pod["args"])


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_the_api_of_old_and_new_clusters_accepts_every_resource(resources: list[Resource], version: str) -> None:
    for resource in resources:
        if is_of_kubernetes(resource):
            kubernetes_validate.validate(resource, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    worker = find(render(KUBERNETES / "cpu"), "Deployment", "worker")
    container(worker)["livenessProbe"]["grpc"]["port"] = "grpc"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, OLDEST, strict=True)


def test_no_file_lies_there_unused() -> None:
    for folder in {file.parent for file in KUBERNETES.rglob("*.yaml")}:
        (kustomization,) = read(folder / "kustomization.yaml")
        assert {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"} <= set(
            kustomization.get("resources", [])
        )


def test_flags_and_environment_are_settings_of_the_service(
    deployment: Resource, resources: list[Resource], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of(deployment, resources, monkeypatch)
    fields = {f"PAGEWIRE_{name.upper()}" for name in SETTINGS[service].model_fields}
    given = {name for one in resources if one["kind"] == "ConfigMap" for name in one["data"]}
    given |= {variable["name"] for variable in container(deployment).get("env", [])}
    assert given <= fields | {"PAGEWIRE_MODEL"}


def test_ports_are_those_that_the_service_listens_on(
    deployment: Resource, resources: list[Resource], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(deployment, resources, monkeypatch)
    default = SETTINGS[service].model_fields["listen"].default
    port = int(settings.listen.rpartition(":")[2])  # type: ignore[attr-defined]
    assert port == int(default.rpartition(":")[2])
    of_pod = container(deployment)
    ports = {port["name"]: port["containerPort"] for port in of_pod["ports"]}
    assert ports["grpc"] == port
    assert {probed(of_pod[probe]) for probe in PROBES} == {port}
    served = {one["targetPort"]: one["port"] for one in find(resources, "Service", service)["spec"]["ports"]}
    assert served == {name: number for name, number in ports.items() if name != "metrics"}
    http = getattr(settings, "http_listen", None)
    assert http == (f"0.0.0.0:{ports['http']}" if "http" in ports else None)


def probed(probe: dict[str, Any]) -> int:
    """The port that a probe asks, by gRPC or by our own command where that would need TLS."""
    if "grpc" in probe:
        return int(probe["grpc"]["port"])
    *command, address, service = probe["exec"]["command"]
    assert command == ["python", "-m", "pagewire_common.healthcheck"]
    assert service == "liveness" or service.startswith("pagewire.v1.")
    return int(address.removeprefix("localhost:"))


def test_the_pod_outlives_its_grace(
    deployment: Resource, resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = settings_of(deployment, resources, monkeypatch).grace
    before = container(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
    closing = 5
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= before + grace + closing


def test_the_scheduler_looks_for_workers_where_their_headless_service_is(resources: list[Resource]) -> None:
    workers = find(resources, "Service", "worker")
    assert workers["spec"]["clusterIP"] == "None"
    (port,) = workers["spec"]["ports"]
    arguments = container(find(resources, "Deployment", "scheduler"))["args"]
    assert f"--workers=dns:///worker:{port['port']}" in arguments


def test_selectors_find_the_pods_that_they_mean(resources: list[Resource], deployment: Resource, service: str) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert find(resources, "Service", service)["spec"]["selector"] == labels
    others = [one["spec"]["template"]["metadata"]["labels"] for one in resources if one["kind"] == "Deployment"]
    assert others.count(labels) == 1
    for budget in (one for one in resources if one["kind"] == "PodDisruptionBudget"):
        assert (
            budget["spec"]["selector"] == find(resources, "Deployment", budget["metadata"]["name"])["spec"]["selector"]
        )
    for constraint in deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
        assert constraint["labelSelector"]["matchLabels"] == labels


def test_workers_have_a_disruption_budget(resources: list[Resource]) -> None:
    assert find(resources, "PodDisruptionBudget", "worker")["spec"]["maxUnavailable"] == 1


def test_containers_can_do_no_more_than_they_must(deployment: Resource) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    of_pod = container(deployment)
    assert of_pod["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert of_pod["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in of_pod["resources"]["limits"]
    assert {mount["name"] for mount in of_pod["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/tmp" in {mount["mountPath"] for mount in of_pod["volumeMounts"]}


def test_the_folder_of_models_is_a_volume(resources: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = find(resources, "Deployment", "worker")
    settings = settings_of(worker, resources, monkeypatch)
    writable = {mount["mountPath"] for mount in container(worker)["volumeMounts"] if not mount.get("readOnly")}
    assert str(settings.cache) in writable  # type: ignore[attr-defined]
    if settings.model.startswith("/"):
        for one in (worker, find(resources, "Deployment", "scheduler")):
            mounts = [mount["mountPath"] for mount in container(one)["volumeMounts"] if mount.get("readOnly")]
            assert any(Path(settings.model).is_relative_to(mount) for mount in mounts)


def test_only_the_scheduler_reaches_workers_and_it_reaches_nothing_else(resources: list[Resource]) -> None:
    deployments = {name: find(resources, "Deployment", name) for name in SETTINGS}
    labels = {name: one["spec"]["selector"]["matchLabels"] for name, one in deployments.items()}
    ports = {
        name: {one["name"]: one["containerPort"] for one in container(deployments[name])["ports"]} for name in labels
    }
    scheduler, worker = ({"podSelector": {"matchLabels": labels[name]}} for name in ("scheduler", "worker"))
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    pickers = [one["spec"]["endpointPickerRef"]["name"] for one in resources if one["kind"] == "InferencePool"]
    picker = [{"podSelector": {"matchLabels": {"inferencepool": name}}} for name in pickers]
    assert allowed(resources, "Ingress", labels["worker"]) == {
        ports["worker"]["grpc"]: [scheduler],
        ports["worker"]["metrics"]: [monitoring],
    }
    assert allowed(resources, "Ingress", labels["scheduler"]) == {
        ports["scheduler"]["grpc"]: [EVERY_PEER],
        ports["scheduler"]["http"]: [EVERY_PEER],
        ports["scheduler"]["metrics"]: [monitoring, *picker],
    }
    out = allowed(resources, "Egress", labels["scheduler"])
    assert out.pop(53)
    assert out.pop(4317, [monitoring]) == [monitoring]
    assert out == {ports["worker"]["grpc"]: [worker]}
    everything_else = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert find(resources, "NetworkPolicy", "deny-all")["spec"] == everything_else


def test_metrics_are_served_where_they_are_scraped(
    deployment: Resource, resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    port = annotations["prometheus.io/port"]
    assert settings_of(deployment, resources, monkeypatch).metrics_listen == f"0.0.0.0:{port}"
    assert {"name": "metrics", "containerPort": int(port)} in container(deployment)["ports"]


async def test_workers_are_scaled_on_metrics_that_the_scheduler_has(tmp_path: Path) -> None:
    engine = Engine(SchedulerSettings())
    metrics = SchedulerMetrics(FrontEnds(engine, 1), lambda: "default", vllm_names=False)
    known = {metric.name for metric in await metrics.families()}
    scaled = find(render(write_overlay(tmp_path, "cpu", "autoscaling", "scale-to-zero")), "ScaledObject", "worker")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "worker"
    assert "replicas" not in find(render(KUBERNETES / "cpu"), "Deployment", "worker")["spec"]
    for trigger in scaled["spec"]["triggers"]:
        assert 'namespace="pagewire"' in trigger["metadata"]["query"]
        (queried,) = re.findall(r"pagewire_\w+", trigger["metadata"]["query"])
        assert queried in known


def test_the_patch_of_the_manual_moves_every_query_to_another_namespace_and_changes_nothing_else(
    tmp_path: Path,
) -> None:
    manual = (KUBERNETES.parent / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n( *patches:\n.*?)```", manual, re.DOTALL)
    more = yaml.safe_load(textwrap.dedent(block))
    overlay = write_overlay(tmp_path, "cpu", "autoscaling", namespace="mine", **more)
    scaled = find(render(overlay), "ScaledObject", "worker")
    (before,) = read(KUBERNETES / "autoscaling" / "worker-scaledobject.yaml")
    for trigger in before["spec"]["triggers"]:
        trigger["metadata"]["query"] = trigger["metadata"]["query"].replace('"pagewire"', '"mine"')
    assert scaled["spec"] == before["spec"]
