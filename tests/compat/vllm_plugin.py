"""A pytest plugin that runs vLLM's own HTTP tests against a running server. vLLM itself is not installed.

The modules of vLLM are replaced by stubs, and the server that the tests would start by the running server. Tests that
send no request are left out: they test vLLM's own functions.
"""

import importlib.machinery
import inspect
import json
import os
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import transformers

URL = os.environ["PAGEWIRE_URL"]


class Nothing:
    """Stands for any object of vLLM: a false value that has every attribute."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def get_vocab_size(self) -> int:
        return len(load_tokenizer())


class Stub(types.ModuleType):
    """Stands for any module of vLLM."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("get_tokenizer"):
            return load_tokenizer
        if name in ("current_platform", "envs"):
            return Nothing()
        return type(name, (Exception,) if name.endswith("Error") else (Nothing,), {})


class Finder:
    """Finds a stub for every module of vLLM."""

    def find_spec(self, name: str, *_: Any) -> Any:
        is_theirs = name.partition(".")[0] == "vllm"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return Stub(spec.name)

    def exec_module(self, _: Any) -> None:
        pass


class RemoteOpenAIServer:
    """The running server. Flags of vLLM have no effect."""

    DUMMY_API_KEY, url_root, uds, show_hidden_metrics = "none", URL, None, False
    host, port = URL.removeprefix("http://").split(":")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *parts))

    def _client(self, kind: Any, path: str = "", **given: Any) -> Any:
        return kind(**{"base_url": URL + path, "api_key": "none", "max_retries": 0, "timeout": 60} | given)

    def __getattr__(self, name: str) -> Any:
        kinds = {
            "get_client": partial(self._client, openai.OpenAI, "/v1"),
            "get_async_client": partial(self._client, openai.AsyncOpenAI, "/v1"),
            "get_client_anthropic": partial(self._client, anthropic.Anthropic),
            "get_async_client_anthropic": partial(self._client, anthropic.AsyncAnthropic),
        }
        if name not in kinds:
            raise AttributeError(name)
        return kinds[name]


def load_tokenizer(*_: Any, **__: Any) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(os.environ["PAGEWIRE_FOLDER"])


def unchanged(*_: Any, **__: Any) -> Any:
    return lambda function: function


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
transformers.AutoTokenizer.from_pretrained = load_tokenizer
utils: Any = Stub("tests.utils")
utils.RemoteOpenAIServer, utils.ROCM_EXTRA_ARGS, utils.VLLM_PATH = RemoteOpenAIServer, [], Path()
utils.multi_gpu_only = utils.requires_fp8 = utils.create_new_process_for_each_test = unchanged
sys.modules["tests.utils"] = utils


def sends(item: Any) -> bool:
    """Whether a test reaches the server, through a fixture or by itself."""
    through_fixture = any(name.endswith(("client", "server")) for name in item.fixturenames)
    return through_fixture or "RemoteOpenAIServer" in inspect.getsource(item.function)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not sends(item)])
    items[:] = [item for item in items if sends(item)]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.failed:
        text = " ".join(str(call.excinfo.value).split())
        said = re.search(r"'message': [\"'](.{1,140})", text)
        line = {"test": item.nodeid, "kind": call.excinfo.typename, "reason": said[1] if said else text[:200]}
        with Path(os.environ["PAGEWIRE_FAILURES"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
