"""Records llama.cpp's answers for llama_cpp_cases.py in loading/llama_cpp_answers.json.

PYTHONPATH=.:tests/worker python tests/worker/ask_llama_cpp.py

Needs the package xllamacpp (recorded with 2026.10.11549), which no test needs.
"""

import json
import multiprocessing
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from llama_cpp_cases import CASES, PROMPT, TEXTS, TOKENIZERS, write_case, write_tokenizer
from small_gguf import NUM_TOKENS

ANSWERS = Path(__file__).with_name("loading") / "llama_cpp_answers.json"


def start(file: Path) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.fit_params = 32, 1, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.no_extra_bufts = True
    return xllamacpp.Server(params)


def logprobs(file: Path) -> list[float]:
    """The prompt's tokens except the first."""
    server, found = start(file), []
    for length in range(1, len(PROMPT)):
        request = {"prompt": PROMPT[:length], "n_predict": 1, "n_probs": NUM_TOKENS, "temperature": 0, "samplers": []}
        answer = server.handle_completions(request | {"cache_prompt": False})
        (token,) = answer["choices"][0]["logprobs"]["content"]
        found += [round(one["logprob"], 5) for one in token["top_logprobs"] if one["id"] == PROMPT[length]]
    return found


def token_ids(file: Path) -> list[list[list[int]]]:
    """Token ids of each text, with special tokens read as text and as tokens."""
    server = start(file)  # the server ends when this object is deleted
    address = server.listening_address
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def tokenize(text: str, parse: bool) -> list[int]:
        content = json.dumps({"content": text, "add_special": True, "parse_special": parse}).encode()
        request = urllib.request.Request(f"{address}/tokenize", content, {"Content-Type": "application/json"})
        with direct.open(request) as answer:
            ids: list[int] = json.load(answer)["tokens"]
            return ids

    return [[tokenize(text, False), tokenize(text, True)] for text in TEXTS if server]


def main() -> None:
    answers: dict[str, dict[str, Any]] = {"logprobs": {}, "tokens": {}}
    alone = multiprocessing.get_context("fork")  # a server for each process, and a process for each server
    with tempfile.TemporaryDirectory() as folder, alone.Pool(1, maxtasksperchild=1) as one:
        file = Path(folder, "model.gguf")
        for name in CASES:
            write_case(name, file)
            answers["logprobs"][name] = one.apply(logprobs, [file])
        for name in TOKENIZERS:
            write_tokenizer(name, file)
            answers["tokens"][name] = one.apply(token_ids, [file])
    ANSWERS.write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
