"""vLLM's own HTTP tests, from its source distribution, against a running server. The server's model has every name."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

VERSION = "0.33.0"
ROUTES = ("openai", "serve", "anthropic")
LEFT_OUT = re.compile(r"_vision|_vlm|prompt_embeds|tensorizer|lmeval|test_uds|sagemaker|multimodal|rpc")
_NAMES = (
    r"(?:Qwen|HuggingFace\w*|openai|meta-llama|microsoft|google|unsloth)/[\w.-]+",
    "zephyr-lora2?",
    "claude-3-7-sonnet-latest",
)
_NAME = re.compile(f'"({"|".join(_NAMES)})"')


def run_vllm_tests(folder: Path, python: str, environment: dict[str, str]) -> bool:
    """Run the tests that need neither a GPU nor a model of their own, and print why tests fail. True if any passes."""
    root = folder / "vllm_tests"
    if not root.exists():
        _unpack(folder, root, environment["PAGEWIRE_MODEL"])
    failures = root / "failures.jsonl"
    failures.unlink(missing_ok=True)
    files = [
        str(path)
        for part in ROUTES
        for path in sorted((root / "tests/entrypoints" / part).rglob("test_*.py"))
        if "RemoteOpenAIServer" in path.read_text() and not LEFT_OUT.search(path.name)
    ]
    options = [
        "-p",
        "vllm_plugin",
        "-p",
        "no:cacheprovider",
        "-c",
        "pytest.ini",
        "--rootdir",
        ".",
        "-q",
        "-W",
        "ignore",
    ]
    options += ["--tb=no", "--timeout", "60", "--continue-on-collection-errors"]
    more = {"PAGEWIRE_FAILURES": str(failures), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [python, "-m", "pytest", *options, *files], cwd=root, env=environment | more, capture_output=True, text=True
    )
    reasons: Counter[str] = Counter()
    for line in failures.read_text().splitlines() if failures.exists() else []:
        found = json.loads(line)
        reasons[f"{found['kind']}: {found['reason'][:90]}"] += 1
    for reason, number in reasons.most_common():
        print(f"{'vllm':18} {number:4} × {reason}")
    print(f"{'vllm':18} {done.stdout.strip().splitlines()[-1]}")
    return " passed" in done.stdout


def _unpack(folder: Path, root: Path, model: str) -> None:
    """Download the source distribution with pip, which cannot build it here, and keep its tests of HTTP."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--no-clean", f"vllm=={VERSION}", "--dest", str(folder)]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True)
    (source,) = folder.glob("pip-download-*/vllm_*/tests/entrypoints")
    (root / "tests").mkdir(parents=True)
    source.rename(root / "tests/entrypoints")
    (root / "tests/__init__.py").touch()
    (root / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    for path in root.rglob("*.py"):
        path.write_text(_NAME.sub(f'"{model}"', path.read_text()))
