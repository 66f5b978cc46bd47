"""Makes a release from a clean checkout: `make release VERSION=x.y.z`.

1. Check that the checkout has no changes, that VERSION is new, and that pyproject.toml and CHANGELOG.md contain it.
2. Build the sdist, and build the wheel from the sdist.
3. Install the wheel in a new virtual environment, and generate a text with it.
4. Build the container images. This step is skipped if neither docker nor podman answers.
5. Tag the commit. The tag is not pushed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("scheduler", "worker")
PROMPT = "The capital of France is"


def problems(version: str, root: Path = ROOT) -> Iterator[str]:
    """The reasons against a release of this version, as sentences that say what to do."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"VERSION is {version!r}; it must be three numbers, such as 1.2.0"
        return
    if changed := _git(root, "status", "--porcelain"):
        yield f"the checkout has changes; commit or remove them: {', '.join(changed.split()[1::2][:5])}"
    written = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if written != version:
        yield f"pyproject.toml has version {written}; set it to {version}"
    changelog = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        yield f'CHANGELOG.md has no heading "## [{version}] - YYYY-MM-DD"'
    elif not found[1].strip():
        yield f"CHANGELOG.md says nothing below [{version}]"
    if f"v{version}" in _git(root, "tag", "--list").split():
        yield f"the tag v{version} exists; choose a new version"


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from the sdist alone, which fails if the sdist lacks a file. Returns the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    backend = "import backend, sys; print(backend.build_sdist(sys.argv[1]))"
    path = os.pathsep.join([str(ROOT / "deploy/wheel"), *filter(None, [os.environ.get("PYTHONPATH")])])
    _run(sys.executable, "-c", backend, str(folder), env=os.environ | {"PYTHONPATH": path})
    (sdist,) = folder.glob("*.tar.gz")
    # The build environment is this one: a new one would install torch again.
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist))
    (wheel,) = folder.glob("*.whl")
    return wheel


def smoke(wheel: Path, version: str) -> None:
    """Install the wheel into a new environment outside the checkout, and generate a text. Exits if it is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(sys.executable, "-m", "venv", str(folder / "venv"))
        programs = folder / "venv" / "bin"
        index = _output(sys.executable, str(ROOT / "deploy/torch_index.py")).split()
        pins = ("-c", str(ROOT / "constraints.txt"))
        _run(str(programs / "pip"), "install", "--quiet", "--no-compile", *index, *pins, str(wheel), cwd=folder)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        said = _output(str(programs / "pagewire"), "--version", cwd=folder, env=clean)
        if said.split() != ["pagewire", version]:
            sys.exit(f"the wheel's program says {said!r}")
        answer = _output(
            str(programs / "pagewire"),
            "generate",
            PROMPT,
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            cwd=folder,
            env=clean,
        )
        if "Paris" not in answer:
            sys.exit(f"the wheel's program continues {PROMPT!r} by {answer!r}")


def build_images(version: str) -> str:
    """Build both images with docker or podman. Returns a sentence: their tags, or why there are none."""
    engine = next((name for name in ("docker", "podman") if shutil.which(name) and _answers(name)), None)
    if engine is None:
        return "no images were built: neither docker nor podman answers"
    for name in IMAGES:
        tag = f"pagewire-{name}:{version}"
        _run(engine, "build", "-t", tag, "-f", f"{name}_service/Dockerfile", ".", cwd=ROOT)
    return f"images: {', '.join(f'pagewire-{name}:{version}' for name in IMAGES)}"


def _answers(engine: str) -> bool:
    return subprocess.run([engine, "info"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release VERSION=x.y.z", description=__doc__)
    parser.add_argument("version", nargs="?", default="", help="x.y.z, as in pyproject.toml and CHANGELOG.md")
    version = parser.parse_args().version
    if found := list(problems(version)):
        sys.exit("\n".join(f"no release: {problem}" for problem in found))
    wheel = build(ROOT / "dist")
    smoke(wheel, version)
    images = build_images(version)
    _run("git", "tag", "-a", f"v{version}", "-m", f"pagewire {version}", cwd=ROOT)
    sys.stdout.write(f"tagged v{version}; {wheel.relative_to(ROOT)} and its sdist were built; {images}\n")


def _git(root: Path, *arguments: str) -> str:
    return _output("git", *arguments, cwd=root)


def _run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    if status := subprocess.run(command, cwd=cwd, env=env).returncode:
        sys.exit(f"{' '.join(command[:6])} … ended with status {status}")


def _output(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command[:6])} … ended with status {result.returncode}")
    return result.stdout


if __name__ == "__main__":
    main()
