"""deploy/kubernetes: each component does what its comment says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize import KUBERNETES, Resource, allowed, container, find, render, write_overlay

ROOT = KUBERNETES.parents[1]
LABELS = {"app.kubernetes.io/name": "pagewire"}


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Renders the overlay `cpu` with components."""

    def render_with(*components: str, **more: Any) -> list[Resource]:
        folder = tmp_path / "-".join((more.get("namespace", "pagewire"), *components))
        folder.mkdir()
        return render(write_overlay(folder, "cpu", *components, **more))

    return render_with


def test_the_autoscaler_of_kubernetes_has_the_thresholds_of_keda(build: Any) -> None:
    ours = find(build("hpa"), "HorizontalPodAutoscaler", "worker")["spec"]
    keda = find(build("autoscaling"), "ScaledObject", "worker")["spec"]
    asked = {one["external"]["metric"]["name"]: one["external"]["target"]["averageValue"] for one in ours["metrics"]}
    assert asked == {
        re.findall(r"pagewire_\w+", one["metadata"]["query"])[0]: one["metadata"]["threshold"]
        for one in keda["triggers"]
    }
    assert ours["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (ours["minReplicas"], ours["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])


@pytest.mark.parametrize("others", [(), ("locked",)])
def test_without_workers_the_scheduler_still_gets_the_request_that_starts_one(
    build: Any, others: tuple[str, ...]
) -> None:
    resources = build("autoscaling", *others, "scale-to-zero")
    assert find(resources, "ScaledObject", "worker")["spec"]["minReplicaCount"] == 0
    scheduler = container(find(resources, "Deployment", "scheduler"))
    assert scheduler["readinessProbe"]["exec"]["command"][-1] == "liveness"
    assert "--no-worker-timeout=1800" in scheduler["args"]


def test_routes_lead_to_ports_of_the_scheduler(build: Any) -> None:
    resources = build("gateway")
    ports = {port["port"]: port["name"] for port in find(resources, "Service", "scheduler")["spec"]["ports"]}
    hosts = []
    for kind, name in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        route = find(resources, kind, "scheduler")["spec"]
        hosts += route["hostnames"]
        (backend,) = route["rules"][0]["backendRefs"]
        assert (backend["name"], ports[backend["port"]]) == ("scheduler", name)
    assert len({*hosts}) == len(hosts)  # a gateway refuses one of two routes of a host


def test_routes_lead_to_no_operators_calls(build: Any) -> None:
    (rule,) = find(build("gateway"), "GRPCRoute", "scheduler")["spec"]["rules"]
    assert {match["method"]["service"] for match in rule["matches"]} == {
        "pagewire.v1.InferenceService",
        "grpc.health.v1.Health",
    }


def test_the_pool_has_the_schedulers_pods_and_the_route_leads_to_it(build: Any) -> None:
    resources = build("gateway", "inference-pool")
    pool = find(resources, "InferencePool", "pagewire")
    scheduler = find(resources, "Deployment", "scheduler")
    assert pool["spec"]["selector"] == scheduler["spec"]["selector"]
    ports = {port["name"]: port["containerPort"] for port in container(scheduler)["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    (backend,) = find(resources, "HTTPRoute", "scheduler")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert "--vllm-metric-names" in container(scheduler)["args"]


def test_the_pod_monitor_names_the_jobs_that_dashboard_and_alerts_ask_for(build: Any) -> None:
    resources = build("pod-monitor")
    (endpoint,) = find(resources, "PodMonitor", "pagewire")["spec"]["podMetricsEndpoints"]
    (label,) = endpoint["relabelings"]
    jobs = set()
    for name in ("scheduler", "worker"):
        deployment = find(resources, "Deployment", name)
        assert endpoint["port"] in {port["name"] for port in container(deployment)["ports"]}
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        jobs.add(label["replacement"].replace("$1", labels["app.kubernetes.io/component"]))
    known = yaml.safe_load((KUBERNETES.parent / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert jobs == {job["job_name"] for job in known}


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_spans_may_leave_for_their_collector(build: Any, service: str) -> None:
    resources = build("otlp")
    endpoint = find(resources, "ConfigMap", "model")["data"]["PAGEWIRE_OTLP_TRACES_ENDPOINT"]
    host, _, port = endpoint.removeprefix("http://").partition(":")
    (to,) = allowed(resources, "Egress", LABELS | {"app.kubernetes.io/component": service})[int(port)]
    assert to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] == host.partition(".")[2]


def test_models_of_the_hub_are_kept_in_a_claim_that_all_workers_write(build: Any) -> None:
    resources = build("hub")
    worker = find(resources, "Deployment", "worker")
    volumes = {volume["name"]: volume for volume in worker["spec"]["template"]["spec"]["volumes"]}
    claim = find(resources, "PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (mount,) = (one for one in container(worker)["volumeMounts"] if one["name"] == "cache")
    assert not mount.get("readOnly")


def test_the_hubs_token_is_the_workers_alone(build: Any) -> None:
    resources = build("hub")
    worker, scheduler = (container(find(resources, "Deployment", name)) for name in ("worker", "scheduler"))
    assert {"secretRef": {"name": "hub-token", "optional": True}} in worker["envFrom"]
    assert "hub-token" not in str(scheduler)


def test_two_namespaces_share_no_object_but_the_routes_hosts(build: Any) -> None:
    """The manual changes the model by a second namespace, whose routes take over when the first one's are deleted."""
    old, new = (build("gateway", namespace=name) for name in ("blue", "green"))
    for resources, name in ((old, "blue"), (new, "green")):
        (namespace,) = (one["metadata"]["name"] for one in resources if one["kind"] == "Namespace")
        assert namespace == name
        assert {one["metadata"].get("namespace", name) for one in resources} == {name}
    for kind in ("HTTPRoute", "GRPCRoute"):
        before, after = (find(resources, kind, "scheduler")["spec"] for resources in (old, new))
        assert before == after
