"""Decides which wheels to fetch so that a machine meets some requirements, using installed packages that fit.

The requirements of installed packages are assumed to be met. If a requirement of a fetched package cannot be met, an
older version is tried.
"""

import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

from bench.gpu.inventory import Inventory, normalised

FROM_THE_MACHINE = frozenset({"torch", "torchaudio", "torchvision", "triton"})
"""Packages of gigabytes that depend on the machine's version of CUDA, and are never fetched."""
NOT_NEEDED = frozenset({
    # kernels for other GPUs than Hopper, for other number formats than bf16, and with a substitute in vLLM
    "flashinfer-cubin", "flashinfer-python", "humming-kernels", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    "quack-kernels", "tilelang", "tokenspeed-mla",
    # videos, fast loading of weights, profiler marks, n-gram drafts
    "fastsafetensors", "numba", "nvtx", "pynvvideocodec", "torchcodec",
})  # fmt: skip
"""Requirements of vLLM that it imports only on use, which the benchmark's models do not need."""


class PackError(ValueError):
    """The packages cannot work together, for the reason in the message."""


Fetch = Callable[[str], Path]
"""Downloads the newest wheel for a requirement such as "name<2". Raises PackError if there is none."""


@dataclass
class Plan:
    """Packages to fetch, that already fit, and to leave out."""

    wheels: dict[str, Path] = field(default_factory=dict)
    """Fetched wheels by normalised name."""
    on_machine: dict[str, str | None] = field(default_factory=dict)
    """Version of each required package that fits; None if unknown."""
    not_needed: set[str] = field(default_factory=set)

    @property
    def versions(self) -> dict[str, str]:
        return {name: version_of(wheel) for name, wheel in sorted(self.wheels.items())}


class UnmetError(PackError):
    """A requirement, of the fetched package `parent`, that cannot be met."""

    def __init__(self, message: str, parent: str | None) -> None:
        super().__init__(message)
        self.parent = parent


def resolve(
    requirements: Sequence[Requirement],
    machine: Inventory,
    fetch: Fetch,
    pins: Mapping[str, SpecifierSet] | None = None,
) -> Plan:
    """Follow the requirements of all fetched packages until all are met.

    `pins` are preferred versions, ignored where a requirement excludes them. Raises PackError if one cannot be met.
    """
    excluded: dict[str, SpecifierSet] = {}
    reasons: list[str] = []
    while True:
        plan = Plan()
        try:
            _follow(requirements, machine, fetch, pins or {}, excluded, plan)
        except UnmetError as unmet:
            reasons.append(str(unmet))
            if unmet.parent is None:
                raise PackError("; ".join(dict.fromkeys([reasons[0], reasons[-1]]))) from unmet
            tried = SpecifierSet(f"!={version_of(plan.wheels[unmet.parent])}")
            excluded[unmet.parent] = excluded.get(unmet.parent, SpecifierSet()) & tried
        else:
            return plan


def _follow(
    requirements: Sequence[Requirement],
    machine: Inventory,
    fetch: Fetch,
    pins: Mapping[str, SpecifierSet],
    excluded: Mapping[str, SpecifierSet],
    plan: Plan,
) -> None:
    asked = dict(excluded)
    followed: set[tuple[Path, str]] = set()
    queue: deque[tuple[Requirement, str | None]] = deque((requirement, None) for requirement in requirements)
    while queue:
        requirement, parent = queue.popleft()
        name = normalised(requirement.name)
        asked[name] = asked.get(name, SpecifierSet()) & requirement.specifier
        if name in NOT_NEEDED:
            plan.not_needed.add(name)
            continue
        if name in machine.packages and _fits(machine.packages[name], asked[name]):
            plan.on_machine[name] = machine.packages[name]
            continue
        if name in FROM_THE_MACHINE:
            has = machine.packages.get(name, "none")
            raise UnmetError(f"{name}{asked[name]} is needed, and the machine has {has}; it is not packed", parent)
        plan.on_machine.pop(name, None)
        if name not in plan.wheels or not _fits(version_of(plan.wheels[name]), asked[name]):
            try:
                plan.wheels[name] = fetch(f"{name}{_pinned(asked[name], pins.get(name))}")
            except PackError as error:
                raise UnmetError(str(error), parent) from error
        wheel = plan.wheels[name]
        for extra in ("", *sorted(requirement.extras)):
            if (wheel, extra) not in followed:
                followed.add((wheel, extra))
                queue.extend((further, name) for further in _requirements_of(wheel, extra, machine))


def read_pins(constraints: Path) -> dict[str, SpecifierSet]:
    """Pinned versions in pip's constraints file."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    found = (Requirement(line) for line in lines if line)
    return {normalised(requirement.name): requirement.specifier for requirement in found}


def platforms(machine: Inventory) -> list[str]:
    """Values of pip's option --platform."""
    major, minor = map(int, machine.glibc.split(".")[:2])
    names = [f"manylinux_{major}_{older}" for older in range(minor, 4, -1)]
    return [f"{name}_{machine.machine}" for name in (*names, "manylinux2014", "manylinux2010", "manylinux1", "linux")]


def version_of(wheel: Path) -> str:
    return str(parse_wheel_filename(wheel.name)[1])


def _fits(version: str | None, asked: SpecifierSet) -> bool:
    """An unknown version always fits."""
    return version is None or asked.contains(version, prereleases=True)


def _pinned(asked: SpecifierSet, pin: SpecifierSet | None) -> SpecifierSet:
    """The pinned version if the requirement allows it, otherwise the requirement."""
    return pin if pin and all(asked.contains(one.version, prereleases=True) for one in pin) else asked


def _requirements_of(wheel: Path, extra: str, machine: Inventory) -> Sequence[Requirement]:
    """The packages that a wheel requires on the machine. With an extra: the packages that the extra requires."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/METADATA"))
        lines = HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    here = {name: str(value) for name, value in default_environment().items()}
    environment = here | {
        "python_version": machine.python,
        "python_full_version": f"{machine.python}.0",
        "platform_machine": machine.machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        always = marker is None or marker.evaluate(environment | {"extra": ""})
        if always if not extra else not always and marker and marker.evaluate(environment | {"extra": extra}):
            found.append(requirement)
    return found
