"""`vllm bench serve` over chats and completions. PEER: a folder with vLLM, as in `make bench`."""

import os
import subprocess
from pathlib import Path

from checks import MODEL, URL, run

COMMAND = Path(os.environ.get("PEER") or "no vLLM") / "venv/bin/vllm"
SIZES = [
    *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"),
    *("--num-prompts", "20", "--ignore-eos"),
]


def bench(backend: str, route: str) -> None:
    asked = ["--base-url", URL, "--endpoint", route, "--model", MODEL, "--tokenizer", os.environ["PAGEWIRE_FOLDER"]]
    command = [str(COMMAND), "bench", "serve", "--backend", backend, *asked, *SIZES]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line.split() for line in done.stdout.splitlines()]
    assert ["Successful", "requests:", "20"] in found, done.stdout[-300:] + done.stderr[-300:]
    assert ["Total", "generated", "tokens:", "320"] in found


def chats() -> None:
    bench("openai-chat", "/v1/chat/completions")


def completions() -> None:
    bench("openai", "/v1/completions")


if COMMAND.exists():
    run(chats, completions)
else:
    print("skip vllm bench serve: make compat PEER=FOLDER needs vLLM in FOLDER/venv")
