"""As much of kustomize as deploy/kubernetes uses, because the real one is in no registry that tests can count on.

A field that is not understood here is an error, and where kubectl is installed the outcome is held against its own.
"""

from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Resource = dict[str, Any]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"


def render(folder: Path) -> list[Resource]:
    """The resources of a kustomization and of all that it is built on, patched."""
    return _build(folder, [])


def _build(folder: Path, resources: list[Resource]) -> list[Resource]:
    """Add what a kustomization, or a component, makes of the resources so far."""
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
            if resource["kind"] != "Namespace":
                resource["metadata"]["namespace"] = namespace
    for image in kustomization.pop("images", []):
        _rename_image(resources, image)
    assert not kustomization, f"{folder}: this renderer does not know {sorted(kustomization)}"
    return resources


def read(file: Path) -> list[Resource]:
    return list(yaml.safe_load_all(file.read_text()))


def container(deployment: Resource) -> Resource:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def _patched(resources: list[Resource], patch: dict[str, Any]) -> list[Resource]:
    target = patch["target"]
    operations = yaml.safe_load(patch["patch"])

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
