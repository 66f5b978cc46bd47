"""Measures the gain of speculative decoding: the same requests to servers with different drafting methods, in turn.

python -m bench speculation [--methods ngram,draft_model] [--model default] [--draft-model NAME] [--sequences 1,8,32]
python -m bench speculation --methods eagle3 --draft-model FOLDER
python -m bench speculation --peer DIR     measures vLLM too, with and without n-grams; DIR as for bench serving

One set of prompts asks to write a function or class of this project again with one name changed, which even a small
model does well, so that the answer repeats the prompt. The other prompts are beginnings of paragraphs of this project's
documentation, continued by sampling, or with --code beginnings of functions. All methods must generate the same tokens.
"""

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import aiohttp

from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB, CONTEXT
from bench.systems.peer_vllm import MODEL, Vllm, vllm_on_cpu
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect

ROOT = Path(__file__).parents[2]
OUTPUT_TOKENS = 128


def edits(*folders: str) -> Iterator[str]:
    """A function or class of 12 to 60 lines, with a request to change a name in it."""
    for file in sorted(file for folder in folders or ("scheduler_service",) for file in (ROOT / folder).rglob("*.py")):
        for part in re.split(r"\n\n\n(?=class |def |async def )", file.read_text())[1:]:
            names = re.findall(r"\bself\._?(\w{5,})|\b(\w{6,}) = ", part)
            if 12 <= part.count("\n") <= 60 and names:
                name = next(filter(None, names[0]))
                yield (
                    f"```python\n{part.strip()}\n```\n\nThe same code, with `{name}` renamed to `{name}_of_all`:\n\n"
                    f"```python\n{part.strip().splitlines()[0]}\n"
                )


def beginnings() -> Iterator[str]:
    for file in sorted((ROOT / "docs").glob("*.md")):
        for paragraph in file.read_text().split("\n\n"):
            if re.match(r"[A-Z][a-z ]", paragraph) and len(words := paragraph.split()) > 40:
                yield " ".join(words[:25])


Call = Callable[[str, SamplingParams], Awaitable[list[int]]]
"""Generates an output after a prompt, and returns its token ids."""


def ours(client: Client) -> Call:
    async def call(prompt: str, sampling: SamplingParams) -> list[int]:
        return (await collect(client, prompt, sampling)).outputs[0].token_ids

    return call


def theirs(session: aiohttp.ClientSession) -> Call:
    async def call(prompt: str, sampling: SamplingParams) -> list[int]:
        body = {"model": MODEL, "prompt": prompt, "return_token_ids": True} | {
            name: getattr(sampling, name) for name in ("max_tokens", "ignore_eos", "seed", "temperature")
        }
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise BenchError(f"vLLM answered {response.status}: {answer}")
            return list(answer["choices"][0]["token_ids"])

    return call


async def run(
    call: Call, prompts: Sequence[str], num_sequences: int, sampling: SamplingParams
) -> tuple[float, list[list[int]]]:
    """Output tokens per second, and each output's token ids."""
    found: list[list[int]] = [[] for _ in prompts]
    left = iter(range(len(prompts)))

    async def work() -> None:
        for number in left:
            found[number] = await call(prompts[number], sampling)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_sequences)))
    return sum(map(len, found)) / (time.perf_counter() - began), found


def functions() -> Iterator[str]:
    """Signatures and docstrings, as prompts for models of code."""
    for file in sorted((ROOT / "scheduler_service").rglob("*.py")):
        for found in re.finditer(r"\n(def \w+\(.*\) -> .*:\n    \"\"\"[^\"]{40,}\"\"\"\n)", file.read_text()):
            yield found[1]


async def drafts(server: LocalServer | Vllm) -> tuple[int, int]:
    """Verified and accepted drafts; 0 for vLLM, whose counters are not read."""
    if isinstance(server, Vllm):
        return 0, 0
    async with Admin(server.admin_target) as admin:
        (worker,) = (await admin.state()).state.workers
        return worker.num_guessed_tokens, worker.num_accepted_tokens


async def compare(
    servers: Mapping[str, LocalServer | Vllm], num_sequences: int, rounds: int, others: Callable[[], Iterator[str]]
) -> None:
    """Compare servers. The first of pagewire's and the first of vLLM's make no drafts."""
    off, *drafting = servers
    references = {one: next(o for o in servers if type(servers[o]) is type(servers[one])) for one in servers}
    async with AsyncExitStack() as stack:
        calls = {name: await connect(server, stack) for name, server in servers.items()}
        for name, source, temperature in (("repeats", edits, 0.0), ("does not", others, 0.8)):
            sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=1, temperature=temperature)
            num_prompts = max(3, num_sequences + num_sequences // 2)
            texts = itertools.cycle(source())
            before = {one: await drafts(servers[one]) for one in drafting}
            rates: dict[str, list[float]] = {one: [] for one in servers}
            are_same = True
            for number in range(rounds):
                prompts = [next(texts) for _ in range(num_prompts)]
                outputs = {}
                first = number % len(servers)
                for one in (*list(servers)[first:], *list(servers)[:first]):
                    rate, outputs[one] = await run(calls[one], prompts, num_sequences, sampling)
                    rates[one].append(rate)
                are_same &= all(outputs[one] == outputs[off] for one in drafting if references[one] == off)
            sys.stdout.write(
                f"{num_sequences:3} at once, text that {name:8}: {statistics.median(rates[off]):7.1f} tok/s"
            )
            for one in drafting:
                verified, right = (
                    now - then for now, then in zip(await drafts(servers[one]), before[one], strict=True)
                )
                ratio = statistics.median(b / a for a, b in zip(rates[references[one]], rates[one], strict=True))
                sys.stdout.write(f"; {one} {statistics.median(rates[one]):.1f}, {ratio:.2f} x")
                if references[one] == off:
                    sys.stdout.write(f", {verified} drafts, {right / max(1, verified):.0%} right")
            sys.stdout.write(f"; {'the same tokens' if are_same else 'OTHER TOKENS'}\n")
            sys.stdout.flush()


async def connect(server: LocalServer | Vllm, stack: AsyncExitStack) -> Call:
    if isinstance(server, LocalServer):
        return ours(await stack.enter_async_context(Client(server.target)))
    timeout = aiohttp.ClientTimeout(total=None)
    return theirs(await stack.enter_async_context(aiohttp.ClientSession(server.url, timeout=timeout)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--methods", default="ngram")
    parser.add_argument("--draft-model")
    parser.add_argument("--code", action="store_true")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-speculative-tokens", default="8")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="as for bench serving; its model is served")
    arguments = parser.parse_args()
    common = ["--max-model-len", str(CONTEXT), "--kv-cache-memory", "1", "--no-forms"]
    with ExitStack() as stack:

        def server(*flags: str) -> LocalServer:
            return stack.enter_context(LocalServer(arguments.model, worker_arguments=[*common, *flags]))

        if arguments.peer:
            arguments.model = str(arguments.peer / "model")
        servers: dict[str, LocalServer | Vllm] = {"none": server()}
        for one in arguments.methods.split(","):
            draft = {"model": arguments.draft_model} if one in ("draft_model", "eagle3") else {}
            most = {"num_speculative_tokens": int(arguments.num_speculative_tokens)}
            servers[one] = server("--speculative-config", json.dumps({"method": one, **draft, **most}))
        if arguments.peer:
            config = {"method": "ngram", "num_speculative_tokens": int(arguments.num_speculative_tokens)}
            lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 16}  # the lengths of n-grams that pagewire matches
            for name, flags in (("vLLM", ()), ("vLLM ngram", ("--speculative-config", json.dumps(config | lookup)))):
                servers[name] = stack.enter_context(vllm_on_cpu(arguments.peer, CACHE_GIB, *flags))
        for num_sequences in map(int, arguments.sequences.split(",")):
            asyncio.run(compare(servers, num_sequences, arguments.rounds, functions if arguments.code else beginnings))


if __name__ == "__main__":
    main()
