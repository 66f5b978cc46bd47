"""A model's folder is data: code that comes with it is never run, whatever its files ask for."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import ForkServer, true_start
from small_gguf import write_gguf

TRAP = """
from pathlib import Path
Path(__file__).with_name("it-ran").touch()
raise SystemExit("code of the model's folder was run")
"""
AUTO_MAP = {
    "AutoConfig": "trap.TrapConfig",
    "AutoModel": "trap.TrapModel",
    "AutoModelForCausalLM": "trap.TrapModel",
    "AutoTokenizer": ["trap.TrapTokenizer", "trap.TrapTokenizer"],
}
LOAD = """
import gc
import sys
from pathlib import Path
import structlog
from scheduler_service.frontend.text.tokenization import Tokenizer
from worker_service.settings import WorkerSettings
from worker_service.execution.worker import load_worker

gc.unfreeze()  # triton reports what is never collected, as a fork server's imports would be
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # nothing is said of missing kernels
settings = WorkerSettings(model=sys.argv[1], device="cpu", num_gpu_blocks_override=4, cache=sys.argv[2])
worker = load_worker(settings)
print("loaded", worker.info.model_id, file=sys.stderr)
served = Path(sys.argv[2]) / "served"
served.mkdir(parents=True)
for file in worker.tokenizer_files:
    (served / file.name).write_bytes(file.read_bytes())
Tokenizer(served)
print("tokenized", file=sys.stderr)
"""


IMPORTS = (
    "worker_service.execution.worker",
    "scheduler_service.frontend.text.tokenization",
    "transformers.modeling_utils",
)
"""Of all but the first test; the last is what transformers imports for a tokenizer where there is torch."""
Load = Callable[[Path, Path], str]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries keep what they fetch."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def server(libraries: Path) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(libraries))
        server = ForkServer(IMPORTS)
    yield server
    server.close()


@pytest.fixture
def load(request: pytest.FixtureRequest, tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """What a worker and a scheduler say that load this model, with the model's folder as their working directory.

    Each model is loaded by a process of its own; the one that is started truly finds the folder before all imports.
    """
    start = true_start if "true_starts" in request.fixturenames else request.getfixturevalue("server").start
    program = tmp_path / "program"
    program.mkdir()
    (program / "load_it.py").write_text(LOAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(program), *filter(None, sys.path)]))
    monkeypatch.setenv("HF_HOME", str(libraries))

    def load(model: Path, cache: Path) -> str:
        folder = model if model.is_dir() else model.parent
        monkeypatch.chdir(folder)
        child = start("load_it", [str(model), str(cache)])
        with child.stderr as stderr:
            said = stderr.read()
        child.wait()
        assert not (folder / "it-ran").exists()
        assert not [*cache.rglob("trap*"), *libraries.rglob("trap*")]
        return said

    return load


def set_traps(folder: Path) -> None:
    """Ask for code by every name that the libraries know, and have it lie there."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(
            json.dumps(content | {"auto_map": AUTO_MAP, "custom_generate": "trap", "trust_remote_code": True})
        )
    for name in ("trap.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py"):
        (folder / name).write_text(TRAP)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(TRAP)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch it-ran'\ntR.")


@pytest.fixture
def trapped(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    set_traps(folder)
    return folder


@pytest.mark.usefixtures("true_starts")
def test_a_folder_is_served_without_its_code(trapped: Path, tmp_path: Path, load: Load) -> None:
    assert load(trapped, tmp_path / "cache") == "loaded model\ntokenized\n"


def with_an_older_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<unk>": 3}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


def test_neither_scaled_positions_nor_an_older_tokenizer_run_it(trapped: Path, tmp_path: Path, load: Load) -> None:
    """Both go through the library that would run it: the frequencies' formula, and the tokenizer's conversion."""
    config = json.loads((trapped / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    (trapped / "config.json").write_text(json.dumps(config))
    with_an_older_tokenizer(trapped)
    (trapped / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert load(trapped, tmp_path / "cache") == "loaded model\ntokenized\n"


def test_a_tokenizer_that_only_its_code_can_make_is_refused(trapped: Path, tmp_path: Path, load: Load) -> None:
    with_an_older_tokenizer(trapped)
    sentence = "cannot be converted to tokenizer.json: it needs code of its own, and a model's code is never run\n"
    assert load(trapped, tmp_path / "cache").endswith(sentence)


def test_a_family_that_only_its_code_knows_is_refused(trapped: Path, tmp_path: Path, load: Load) -> None:
    config = json.loads((trapped / "config.json").read_text())
    (trapped / "config.json").write_text(json.dumps(config | {"model_type": "trap"}))
    assert "a model trap is not supported" in load(trapped, tmp_path / "cache")


def test_a_gguf_file_is_converted_without_the_code_beside_it(tmp_path: Path, load: Load) -> None:
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "small.gguf")
    set_traps(tmp_path / "models")
    assert "loaded small\ntokenized\n" in load(tmp_path / "models" / "small.gguf", tmp_path / "cache")
