"""vLLM's own HTTP tests, from its source distribution, against servers of this checkout. Nothing of vLLM is kept.

Each group of tests gets a server with a model of its kind, whose name the tests use. vLLM's Python modules are imported
from the source distribution, so its tests compare our answers with its own classes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from outcomes import Outcome
from safetensors.torch import load_file, save_file
from vllm_reasons import OTHER, Result, reason_of, report

from pagewire_client.local import LocalServer
from worker_service.loading.model_store import find_model

VERSION = "0.33.0"
NAME = "pagewire/served"
PACKAGES = [
    *("pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "tblib", "jsonschema", "soundfile"),
    *("msgspec", "cbor2", "fastapi>=0.133,<0.137", "orjson", "blake3", "py-cpuinfo", "partial-json-parser", "uvloop"),
    *("cachetools", "psutil", "tiktoken", "mistral_common[image]>=1.11.6", "oss-harmony", "setproctitle", "ijson"),
    *("lark==1.2.2", "cloudpickle", "depyf", "mcp", "pyzmq", "python-json-logger", "watchfiles", "regex", "httpx"),
    *("prometheus-fastapi-instrumentator", "model-hosting-container-standards", "pillow", "einops", "pybase64"),
    *("sentence-transformers", "sentencepiece", "requests", "prometheus-client", "apache-tvm-ffi", "rapidfuzz"),
]
ALONE = ["xgrammar"]
"""Packages of vLLM that are installed without their own requirements."""
PARTS = ("entrypoints", "tool_use")
_HUB_NAME = re.compile(
    r'"(?!application|text/|image/|video|audio|multipart|v\d/|tests/|examples/|vllm|chat/)'
    r'([A-Za-z][\w-]*/[\w.-]+|claude-3-7-sonnet-latest)"'
)
_HAS_VECTORS = r"pooling/(embed|basic|token_embed|scoring/test_bi_encoder)|serve/middleware"


class Group(NamedTuple):
    """Tests of one kind of model. `takes`: the regular expressions of their files and of other groups' files."""

    takes: str
    leaves: str
    worker: list[str]
    scheduler: list[str]


GROUPS = {
    "model": Group(
        "",
        f"pooling/|{_HAS_VECTORS}",
        ["--forms", "--max-loras", "2", "--max-model-len", "8192"],
        ["--vllm-metric-names"],
    ),
    "vectors": Group(_HAS_VECTORS, "^$", [], []),
    "pairs": Group("pooling/", _HAS_VECTORS, ["--max-model-len", "100"], []),
}


def run_vllm_tests(folder: Path, python: str, models: Mapping[str, str], page: Path | None) -> Iterator[Outcome]:
    """Run the tests of each group whose model is named, and write their results by reason.

    A test that does not pass counts as skipped if it has a reason, else as failed.

    `page`: a file for the table, instead of the output.
    """
    root = folder / "vllm"
    if not root.exists():
        _unpack(folder, root)
    results: list[Result] = []
    for name, group in GROUPS.items():
        if name in models:
            home = folder / f"tests_{name}"
            results += _run_group(root, home, python, group, _prepared(models[name], home))
    table = report(results, VERSION, {name: Path(model).name for name, model in models.items()})
    page.write_text(table) if page is not None else print(table)
    passed = sum(result.kind == "passed" for result in results)
    unknown = [result.test for result in results if result.kind != "passed" and reason_of(result) == OTHER]
    yield Outcome("pass" if passed else "fail", "tests", passed or 1)
    yield Outcome("skip", "tests that do not pass for a reason of the table", len(results) - passed - len(unknown))
    yield from (Outcome("fail", f"{test} has no reason") for test in unknown)


def _run_group(root: Path, home: Path, python: str, group: Group, model: Path) -> list[Result]:
    adapter = _write_adapter(model, home / "adapter") if "--max-loras" in group.worker else None
    names = [f"zephyr-lora={adapter}"] if adapter else []
    scheduler = ["--served-model-name", NAME, *group.scheduler, *(["--lora-modules", *names] if names else [])]
    files = [
        str(path)
        for part in PARTS
        for path in sorted((root / "tests" / part).rglob("test_*.py"))
        if re.search(group.takes, str(path)) and not re.search(group.leaves, str(path))
    ]
    options = ["-p", "vllm_plugin", "-p", "no:cacheprovider", "-c", str(root / "pytest.ini"), "--rootdir", str(root)]
    options += ["-q", "-W", "ignore", "--tb=no", "--timeout", "60", "--continue-on-collection-errors"]
    found = home / "results.jsonl"
    found.unlink(missing_ok=True)
    worker = [*group.worker, *(["--quantization", "gguf"] if (model / "gguf_blocks.safetensors").exists() else [])]
    with ExitStack() as servers:
        server = servers.enter_context(LocalServer(str(model), worker_arguments=worker, scheduler_arguments=scheduler))
        more = {"PAGEWIRE_URL": server.http_url, "PAGEWIRE_RESULTS": str(found), "HF_HUB_OFFLINE": "1"}
        more |= {"PYTHONPATH": f"{root}:{Path(__file__).parent}", "VLLM_LOGGING_LEVEL": "ERROR"}
        if any("serve/middleware" in file for file in files):
            locked = LocalServer(str(model), scheduler_arguments=[*scheduler, "--api-key", "test"])
            more["PAGEWIRE_LOCKED_URL"] = servers.enter_context(locked).http_url
        models = ["--models", "hermes"] if any("tool_use" in file for file in files) else []
        command = [python, "-m", "pytest", *options, *files, *models]
        subprocess.run(command, cwd=home, env=os.environ | more, stdout=subprocess.DEVNULL)
    lines = map(json.loads, found.read_text().splitlines())
    by_test: dict[str, Result] = {}
    for line in lines:
        result = Result(line["test"].rpartition("tests/")[2], line["result"], line["reason"])
        if by_test.setdefault(result.test, result).kind == "passed":  # the end of a test may fail after it passed
            by_test[result.test] = result
    return list(by_test.values())


# ---- what the tests need


def _unpack(folder: Path, root: Path) -> None:
    """Download the source distribution with pip, which cannot build it here, and give all models in it one name."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--no-clean", f"vllm=={VERSION}", "--dest", str(folder)]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True)
    (source,) = folder.glob("pip-download-*/vllm_*")
    source.rename(root)
    (root / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (root / "gpt_oss").mkdir()
    (root / "gpt_oss/__init__.py").touch()  # tests of responses ask whether it is installed, and do not use it
    for part in PARTS:
        for path in (root / "tests" / part).rglob("*.py"):
            path.write_text(_HUB_NAME.sub(f'"{NAME}"', path.read_text()))


def _prepared(asked: str, home: Path) -> Path:
    """A copy of a model's folder, where the tests find it under its name, with what vLLM's models have."""
    source = find_model(asked, Path("~/.cache/pagewire").expanduser()).path
    folder = home / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text())
    if "classifier.weight" in (weights := _weights(source)):
        _keep_one_class(folder, config, weights)
    elif (about := json.loads((source / "tokenizer_config.json").read_text())).get("chat_template"):
        opening = r"\{\{-? '<\|im_start\|>assistant\\n' \}\}"
        no_thinking = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        about["chat_template"] = re.sub(
            rf"{opening}(?!.*{opening})", lambda it: it[0] + no_thinking, about["chat_template"], flags=re.DOTALL
        )
        _replace(folder / "tokenizer_config.json", about)
    return folder


def _weights(source: Path) -> dict[str, torch.Tensor]:
    file = source / "model.safetensors"
    return load_file(file) if file.stat().st_size < 1 << 28 else {}


def _keep_one_class(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Make a cross-encoder of two classes one of one class with the same scores, as vLLM's tests have."""
    for name in ("classifier.weight", "classifier.bias"):
        if len(weights[name]) == 2:
            weights[name] = weights[name][1:] - weights[name][:1]
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _replace(folder / "config.json", config | {"num_labels": 1, "id2label": {"0": "yes"}, "label2id": {"yes": 0}})


def _replace(link: Path, content: dict[str, Any]) -> None:
    link.unlink()
    link.write_text(json.dumps(content))


def _write_adapter(model: Path, folder: Path) -> Path:
    """A random adapter of the model's query projections."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs, draw = heads * (config.get("head_dim") or hidden // heads), torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{module}.lora_A.weight"] = torch.randn(8, hidden, generator=draw) * 0.02
        weights[f"{module}.lora_B.weight"] = torch.randn(outputs, 8, generator=draw) * 0.02
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
