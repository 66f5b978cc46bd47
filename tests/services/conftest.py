import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from speculating import Plain, answers_of
from tiny_agent import serve_agent
from tiny_model import write_byte_tokenizer, write_tiny_llama

from pagewire_client import LocalServer
from pagewire_common.connection import tls
from scheduler_service.core.suspects import rule
from scheduler_service.engine.sessions import worker_loop
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.tokenization import Tokenizer
from worker_service.speculation import drafter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="20,000 requests in test_soak.py")


@pytest.fixture(scope="session")
def byte_tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single bytes, so that every character beyond ASCII spans several tokens."""
    directory = tmp_path_factory.mktemp("byte-tokenizer")
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects wait for half a second, lost workers for a tenth.

    A suspect may wait for three seconds on a busy machine, and may end after a loss or two more.
    """
    monkeypatch.setattr(worker_loop, "LAST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(rule, "MAX_CONTROL_SECONDS", 3.0)
    monkeypatch.setattr(rule, "NOTICE_SECONDS", 0.001)


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer(byte_tokenizer_directory)


@pytest.fixture(scope="session")
def byte_model(byte_tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="bytes",
        fingerprint="f",
        dtype="float32",
        context_length=100,
        block_size=4,
        pool_tokens=400,
        vocabulary_size=259,
        max_num_seqs=8,
        has_priorities=False,
        has_forms=True,
        eos_token_ids=(2,),
        tokenizer=byte_tokenizer,
    )


@pytest.fixture(scope="session")
def tiny_model_directory(byte_tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with the byte tokenizer."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    write_tiny_llama(directory, byte_tokenizer_directory)
    return directory


@pytest.fixture(scope="session")
def tiny_server(tiny_model_directory: Path) -> Iterator[LocalServer]:
    """Both services with the tiny model and a pool of 64 blocks: 512 tokens."""
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            *("--num-gpu-blocks-override", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0", "--forms"),
        ],
        scheduler_arguments=["--check-invariants"],
    ) as server:
        yield server


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Both services with a model whose chat template has thinking and tools."""
    with serve_agent(tmp_path_factory.mktemp("agent")) as server:
        yield server


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """Three low-rank adapters for the tiny model."""
    from tiny_adapters import write_three

    return write_three(tmp_path / "adapters")


@pytest.fixture(scope="module")
def plain(tiny_server: LocalServer) -> Plain:
    return asyncio.run(answers_of(tiny_server.target))


@pytest.fixture
def all_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are made and verified, faster or not."""
    monkeypatch.setattr(drafter, "numbers_of_drafts", lambda _, mosts, *__, **___: list(mosts))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed certificates are used at once, not a second later."""
    monkeypatch.setattr(tls, "SETTLE_SECONDS", 0.0)
