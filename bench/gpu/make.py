"""Downloads the packages that a GPU machine lacks, and writes the archives of pack.py's two folders in pieces."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from bench.gpu.inventory import Inventory, normalised
from bench.gpu.pieces import Part, cut, write_archive, write_manifest
from bench.gpu.resolve import PackError, Plan, platforms, read_pins, resolve

ROOT = Path(__file__).parents[2]
GROUPS = ("scheduler", "worker", "client")
LEFT_OUT = (
    # FlashAttention 2 (190 MB) is left out, because vLLM uses FlashAttention 3 on Hopper
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",  # vLLM's optional Rust front end (38 MB), which is off by default
)


def plan(machine: Inventory, vllm: str, folder: Path) -> dict[str, Plan]:
    """The plan of each folder for a machine. Raises PackError if a requirement cannot be met."""
    pins = read_pins(ROOT / "constraints.txt")
    # The code generated from protos/ requires at least its generator's versions.
    runtime = [Requirement(f"{name}>={next(iter(pins[name])).version}") for name in ("grpcio", "protobuf")]
    command = [sys.executable, str(ROOT / "deploy/wheel/requirements.py"), *GROUPS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    ours = [*map(Requirement, lines), *runtime]

    def fetch(requirement: str) -> Path:
        return download(requirement, machine, folder / "wheels")

    return {
        "vllm": resolve([Requirement(f"vllm=={vllm}")], machine, fetch),
        "pagewire": resolve(ours, machine, fetch, pins),
    }


def write(plans: Mapping[str, Plan], folder: Path, piece_bytes: int, *, whole: bool) -> list[Part]:
    """Write the pieces and the manifest, replacing older pieces. `whole` includes files that Hopper does not use."""
    for older in folder.glob("*.zip*"):
        older.unlink()
    generated = {str(file.relative_to(ROOT / "protos")): file for file in ROOT.glob("protos/pagewire/v1/*_pb2*.py")}
    if not generated:
        raise PackError("there is no code of protos/ yet: run `make proto` first")
    parts = []
    for name, planned in plans.items():
        archive = folder / f"{name}.zip"
        files = generated if name == "pagewire" else {}
        write_archive(archive, planned.wheels.values(), files, () if whole else LEFT_OUT)
        parts.append(cut(archive, folder, piece_bytes, planned.versions))
    write_manifest(folder, parts)
    return parts


def download(requirement: str, machine: Inventory, folder: Path) -> Path:
    """The newest wheel that meets a requirement and runs on the machine, in the folder already or downloaded.

    Raises PackError if there is none.
    """
    wanted = Requirement(requirement)
    if wheel := newest(folder, wanted):
        return wheel
    digits = machine.python.replace(".", "")
    found = subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", folder,
            "--no-deps", "--only-binary", ":all:", "--python-version", machine.python, "--implementation", "cp",
            *(part for abi in (f"cp{digits}", "abi3", "none") for part in ("--abi", abi)),
            *(part for name in platforms(machine) for part in ("--platform", name)), requirement,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if wheel := newest(folder, wanted):
        return wheel
    raise PackError(f"there is no wheel for {requirement}: {found.stderr.strip()[-500:]}")


def newest(folder: Path, wanted: Requirement) -> Path | None:
    versions = {
        version: wheel
        for wheel in folder.glob("*.whl")
        for name, version, *_ in [parse_wheel_filename(wheel.name)]
        if name == normalised(wanted.name) and wanted.specifier.contains(version, prereleases=True)
    }
    return versions[max(versions)] if versions else None
