"""A pytest plugin that runs vLLM's own HTTP tests against a running server, and writes down how each test ends.

vLLM's Python modules come from its source distribution. Only the class that starts vLLM's server is replaced.
"""

import inspect
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import vllm.distributed
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
vllm.distributed.cleanup_dist_env_and_memory = lambda *_, **__: None  # would ask for a GPU

from vllm.transformers_utils import repo_utils

from tests import utils

URL = os.environ["PAGEWIRE_URL"]
ONLY_COUNTED = re.compile(r"multimodal|vision|_vlm|test_image|speech_to_text|scale_out|launchers|sagemaker|serve/lora")
"""Tests with files from the network, of routes between vLLM's own processes, of the end of its server, or of adapters
that it would load. Without such a route, one of the last never ends.
"""


class RunningServer(utils.RemoteOpenAIServer):  # type: ignore[misc]
    """The running server, or with the flag --api-key the one that has a key. vLLM's other flags have no effect."""

    DUMMY_API_KEY, uds, show_hidden_metrics = "none", None, False

    def __init__(self, _: str = "", flags: Sequence[str] = (), **__: Any) -> None:
        self._url = os.environ.get("PAGEWIRE_LOCKED_URL", URL) if "--api-key" in flags else URL
        self.host, self.port = urlsplit(self._url).hostname, urlsplit(self._url).port

    def __exit__(self, *_: Any) -> None:
        pass

    @property
    def url_root(self) -> str:
        return self._url


class Nowhere:
    """Stands for the hub: downloads are for flags of vLLM's server."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return ""


repo_utils.hf_api = Nowhere
utils.RemoteOpenAIServer = utils.RemoteLaunchRenderServer = utils.RemoteOpenAIServerCustom = RunningServer


def sends(item: Any) -> bool:
    """Whether a test or one of its fixtures names the server's class, or a fixture of such a file is a client."""
    fixtures = (one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found)
    is_client = any(name.endswith(("client", "server")) for name in item.fixturenames)
    return any(map(_names_server, (item.function, *fixtures))) or (is_client and _names_server(item.module))


@cache
def _names_server(code: Any) -> bool:
    has_source = inspect.isfunction(code) or inspect.ismodule(code)
    return has_source and re.search("Remote(OpenAI|LaunchRender)Server", inspect.getsource(code)) is not None


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out tests that send no request: they test vLLM's own functions. Of the others, some are only counted."""
    counted = [item for item in items if sends(item) and ONLY_COUNTED.search(item.nodeid)]
    for item in counted:
        _write(item.nodeid, "not run")
    run = [item for item in items if sends(item) and item not in counted]
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = run


def _write(test: str, result: str, reason: str = "") -> None:
    with Path(os.environ["PAGEWIRE_RESULTS"]).open("a") as file:
        file.write(json.dumps({"test": test, "result": result, "reason": reason}) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" and report.passed:
        _write(item.nodeid, "passed")
    elif report.failed or report.skipped:
        text = " ".join(str(call.excinfo.value).split())
        said = re.search(r"'message': [\"'](.{1,140})", text)
        kind = "skipped" if report.skipped else "failed"
        _write(item.nodeid, kind, f"{call.excinfo.typename}: {said[1] if said else text[:200]}")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", " ".join(str(report.longrepr).split())[-200:])
