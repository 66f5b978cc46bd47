"""deploy/kubernetes: built by kubectl as by our tests, and checked with the schemas of the operators' APIs."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml
from kustomize import KUBERNETES, TOGETHER, Resource, is_of_kubernetes, render, write_overlay

PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "cert-manager.io": "cert-manager",
    "monitoring.coreos.com": "prometheus-operator",
}
UNCHECKED = {"inference.networking.k8s.io"}
"""APIs whose schemas no package has."""


def overlays(folder: Path) -> Iterator[Path]:
    for base in ("cpu", "gpu"):
        yield KUBERNETES / base
        for components in (*([name] for name in NEED_NO_OTHER), TOGETHER):
            one = folder / f"{base}-{'-'.join(components)}"
            one.mkdir(exist_ok=True)
            yield write_overlay(one, base, *components, namespace="mine")


NEED_NO_OTHER = sorted({*TOGETHER, "hpa"} - {"inference-pool", "scale-to-zero"})


def differences(kubectl: Path, folder: Path) -> str:
    """What kubectl builds otherwise than our tests' renderer, in words. Nothing if all is equal."""
    for overlay in overlays(folder):
        built = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
        if built.returncode:
            return built.stderr
        if _in_order(list(yaml.safe_load_all(built.stdout))) != _in_order(render(overlay)):
            return f"{overlay.name}: our renderer's result differs"
    return ""


def refusals(home: Path, folder: Path) -> str:
    """What the schemas refuse, in words. TypeScript finds unknown fields, the package's validators wrong values."""
    every = render(write_overlay(folder, "gpu", *TOGETHER, namespace="mine"))
    groups = {resource["apiVersion"].partition("/")[0] for resource in every if not is_of_kubernetes(resource)}
    if unknown := groups - {*PACKAGES} - UNCHECKED:
        return f"no schemas of {unknown}"
    resources = [one for one in every if one["apiVersion"].partition("/")[0] in PACKAGES]
    program = home / "resources.mjs"
    program.write_text("\n".join(_statements(resources)))
    types = ["npx", "tsc", "--noEmit", "--checkJs", "--strict", "--target", "es2022", "--module", "nodenext"]
    for command in ([*types, "--skipLibCheck", program.name], ["node", program.name]):
        done = subprocess.run(command, cwd=home, capture_output=True, text=True)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def _statements(resources: list[Resource]) -> Iterator[str]:
    for number, resource in enumerate(resources):
        group, _, version = resource["apiVersion"].partition("/")
        module = f"@kubernetes-models/{PACKAGES[group]}/{group}/{version}"
        yield f'import {{ {resource["kind"]} as Kind{number} }} from "{module}";'
        fields = {name: value for name, value in resource.items() if name not in ("apiVersion", "kind")}
        yield f"new Kind{number}({json.dumps(fields)}).validate();"


def _in_order(resources: list[Resource]) -> list[Resource]:
    return sorted(resources, key=lambda one: (one["kind"], one["metadata"]["name"]))
