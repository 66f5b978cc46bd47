"""The part of kustomize that deploy/kubernetes uses, because the real one takes 60 MB and has no small package.

An unknown field is an error. `make operators` fetches kubectl, and compares the results.
"""

import os
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Resource = dict[str, Any]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"

ALTERNATIVES = {"hpa"}
"""Components that another component excludes: `autoscaling` scales the same Deployment."""

TOGETHER = sorted(
    file.parent.name
    for file in KUBERNETES.glob("*/kustomization.yaml")
    if "kind: Component" in file.read_text() and file.parent.name not in ALTERNATIVES
)
"""All other components. The order of the alphabet is one of those that their comments ask for."""

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

EVERY_PEER = None


def write_overlay(folder: Path, base: str, *components: str, **more: Any) -> Path:
    """Write a kustomization of one of our bases with components, and return its folder."""
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / base, folder)],
        "components": [os.path.relpath(KUBERNETES / component, folder) for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(whole | more))
    return folder


def render(folder: Path) -> list[Resource]:
    """The resources of a kustomization and all its bases, patched."""
    return _build(folder, [])


def _build(folder: Path, resources: list[Resource]) -> list[Resource]:
    """Apply a kustomization, or a component, to the resources so far."""
    (kustomization,) = read(folder / "kustomization.yaml")
    assert kustomization.pop("apiVersion").startswith("kustomize.config.k8s.io/")
    assert kustomization.pop("kind") in ("Kustomization", "Component")
    for name in kustomization.pop("resources", []):
        path = folder / name
        resources = resources + (render(path) if path.is_dir() else read(path))
    for name in kustomization.pop("components", []):
        resources = _build(folder / name, resources)
    for patch in kustomization.pop("patches", []):
        resources = _patched(resources, patch)
    if namespace := kustomization.pop("namespace", None):
        for resource in resources:
            resource["metadata"]["name" if resource["kind"] == "Namespace" else "namespace"] = namespace
    for image in kustomization.pop("images", []):
        _rename_image(resources, image)
    assert not kustomization, f"{folder}: this renderer does not know {sorted(kustomization)}"
    return resources


def read(file: Path) -> list[Resource]:
    return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))


def is_of_kubernetes(resource: Resource) -> bool:
    """Whether the API is built into Kubernetes, so that its own schemas describe the resource."""
    group = resource["apiVersion"].rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith(("gateway.", "inference.")))


def container(deployment: Resource) -> Resource:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def find(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def allowed(resources: list[Resource], direction: str, labels: dict[str, str]) -> dict[int, list[Any]]:
    """The peers of pods with these labels, by port."""
    peers: dict[int, list[Any]] = {}
    for policy in (one["spec"] for one in resources if one["kind"] == "NetworkPolicy"):
        selected = policy["podSelector"].get("matchLabels", {}).items() <= labels.items()
        if selected and direction in policy["policyTypes"]:
            for rule in policy.get(direction.lower(), []):
                for port in {port["port"] for port in rule["ports"]}:
                    found = rule.get("from" if direction == "Ingress" else "to", [EVERY_PEER])
                    peers.setdefault(port, []).extend(found)
    return peers


def _patched(resources: list[Resource], patch: dict[str, Any]) -> list[Resource]:
    target = patch["target"]
    operations = yaml.load(patch["patch"], yaml.CSafeLoader)

    def is_meant(resource: Resource) -> bool:
        return resource["kind"] == target["kind"] and target.get("name") in (None, resource["metadata"]["name"])

    assert set(patch) == {"target", "patch"}
    assert set(target) <= {"kind", "name"}
    assert any(map(is_meant, resources)), f"no resource is {target}"
    return [jsonpatch.apply_patch(resource, operations) if is_meant(resource) else resource for resource in resources]


def _rename_image(resources: list[Resource], image: dict[str, str]) -> None:
    assert set(image) == {"name", "newName"}
    containers = [
        container
        for resource in resources
        if resource["kind"] == "Deployment"
        for container in resource["spec"]["template"]["spec"]["containers"]
        if container["image"] == image["name"]
    ]
    assert containers, f"no container has the image {image['name']}"
    for container in containers:
        container["image"] = image["newName"]
