"""The client class, offline batches and the command line, against real services with a tiny model."""

import asyncio
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from pagewire_client import LLM, Client, LocalServer, SamplingParams, ServerError
from pagewire_client.cli.parser import parse_arguments
from pagewire_client.client import RETRY_SECONDS
from pagewire_client.llm import collect


def command_line(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire_client", *arguments], input=stdin, capture_output=True, text=True, timeout=120
    )


def alone(target: str, prompt: str, sampling: SamplingParams) -> list[int]:
    async def run() -> list[int]:
        async with Client(target) as client:
            return (await collect(client, prompt, sampling)).outputs[0].token_ids

    return asyncio.run(run())


def test_a_batch_comes_back_in_the_order_of_its_prompts(tiny_server: LocalServer) -> None:
    prompts = ["x" * length for length in (90, 3, 40, 1)]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    completions = LLM(target=tiny_server.target).generate(prompts, sampling, progress=False)
    assert [completion.prompt for completion in completions] == prompts
    assert [completion.prompt_tokens for completion in completions] == [90, 3, 40, 1]
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.outputs[0].token_ids == alone(tiny_server.target, prompt, sampling)


def test_each_prompt_may_have_its_own_parameters(tiny_server: LocalServer) -> None:
    llm = LLM(target=tiny_server.target)
    each = [SamplingParams(max_tokens=n, n=n, ignore_eos=True) for n in (1, 2)]
    completions = llm.generate(["a", "b"], each, progress=False)
    assert [[len(o.token_ids) for o in c.outputs] for c in completions] == [[1], [2, 2]]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], each[:1], progress=False)
    assert llm.generate([], progress=False) == []
    assert len(llm.generate("one text", SamplingParams(max_tokens=1), progress=False)) == 1


def test_a_refused_prompt_raises_the_servers_sentence(tiny_server: LocalServer) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="text is empty"):
        LLM(target=tiny_server.target).generate(["fine", ""], SamplingParams(max_tokens=1), progress=False)


def test_an_llm_starts_both_services_and_stops_them_when_it_is_gone(
    tiny_model_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(
        str(tiny_model_directory),
        worker_arguments=["--threads", "1", "--num-gpu-blocks-override", "64"],
        scheduler_arguments=["--scheduling-policy", "priority"],
    )
    assert llm._server is not None
    processes = [service.process for service in llm._server.processes]
    assert [process.poll() for process in processes] == [None, None]
    (completion,) = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True), priority=2)
    assert len(completion.outputs[0].token_ids) == 3
    assert "1/1" in capfd.readouterr().err  # the progress bar
    del llm
    gc.collect()
    assert [process.poll() for process in processes] == [0, 0]


def test_ctrl_c_ends_a_batch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def interrupt() -> None:
            with silent.accept()[0]:
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            LLM(target=f"127.0.0.1:{silent.getsockname()[1]}").generate("hello", progress=False)
        thread.join()
    assert time.monotonic() - began < RETRY_SECONDS / 2


def test_a_model_that_cannot_be_served_is_an_error_in_words() -> None:
    with pytest.raises(ServerError, match="/nowhere"):
        LocalServer("/nowhere")


def test_generate_streams_to_stdout_and_reports_speed_on_stderr(tiny_server: LocalServer) -> None:
    result = command_line("generate", "--target", tiny_server.target, "--max-tokens", "5", "hello")
    assert result.returncode == 0
    assert re.search(r"\[5 tokens, first after [\d.]+ s", result.stderr)
    piped = command_line("generate", "--target", tiny_server.target, "--max-tokens", "5", "-", stdin="hello")
    assert piped.stdout == result.stdout
    assert "[5 tokens" in result.stderr


def test_chat_keeps_the_conversation(tiny_server: LocalServer) -> None:
    """The context has 512 tokens, and a refused turn is forgotten: the third fits again."""
    arguments = ("chat", "--target", tiny_server.target, "--max-tokens", "20", "--temperature", "0")
    result = command_line(*arguments, stdin=f"{'a' * 200}\n{'b' * 250}\nc\n")
    assert result.returncode == 0
    assert result.stderr.count("tokens, first after") == 2
    assert "the context has 512" in result.stderr


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    result = command_line("generate", "--target", "127.0.0.1:1", "--retry-for", "0", "hello")
    assert result.returncode == 1
    assert result.stderr.startswith("pagewire_client: UNAVAILABLE: ")
    assert "Traceback" not in result.stderr


def test_a_server_that_is_not_there_is_waited_for_as_long_as_was_said() -> None:
    result = command_line("generate", "--target", "127.0.0.1:1", "--retry-for", "0.3", "hello")
    assert result.returncode == 1
    waiting, given_up = result.stderr.splitlines()
    assert "trying again for 0.3 s" in waiting
    assert given_up.startswith("pagewire_client: UNAVAILABLE: ")


def test_a_command_with_a_server_of_its_own_tries_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_TARGET", raising=False)
    assert parse_arguments(["generate", "hello"]).retry_for == 0
    assert parse_arguments(["generate", "--target", "somewhere:1", "hello"]).retry_for == 60
