"""Every causal type of transformers, compared with transformers in float32: `python tests/worker/model_sweep.py`.

Each type's tiny random network runs in a process of its own, forked from this one, with a time limit. `--write` writes
the table of docs/models.md, which tests/worker/models/test_model_table.py reads. Names of types select them; the table
keeps the rows of the others.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from gemma3n_files import write_whole
from stepped_worker import PROMPT, Oracle, SteppedWorker, generate_with_everything, load_runner, make_nan
from tiny_networks import LENGTH, save_tokenizer, tiny_config, tiny_network
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from worker_helpers import embeddings_item

from worker_service.execution.cache.layer_groups import group_layers
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.layer_needs import needs_of
from worker_service.models.registry import AnyConfig, read_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- table of types -->\n).*?(<!-- end -->\n)", re.DOTALL)
TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4"})
"""Mistral 4's class continues text, but transformers has it among those of images."""
NATIVE, THEIRS, REFUSED, WRONG, NOT_BUILT = "native", "transformers' code", "refused", "WRONG", "not built"
SECONDS = 120
NUM_TOKENS = 14
MAX_REASON = 240
TOLERANCE = 1e-3
"""Of log-probabilities, for each unit of the largest logit."""


@dataclass(frozen=True)
class Outcome:
    model_type: str
    status: str
    reason: str = ""
    groups: str = ""
    """See `groups_of`."""
    seconds: float = 0.0


def check(model_type: str, folder: Path) -> Outcome:
    """Compare one type. Its checkpoint is written to `folder`."""
    try:
        json_ = json.loads(tiny_config(model_type).to_json_string())
    except Exception as error:  # the code of any type
        return Outcome(model_type, NOT_BUILT, f"transformers makes no configuration of these sizes ({one_line(error)})")
    try:
        oracle = write_checkpoint(model_type, folder)
        expected = oracle.logprobs(PROMPT)
        if not expected.isfinite().all():
            raise ValueError("its logits are not finite")
    except Exception as error:
        try:
            read_config(json_)
        except ValueError as refusal:
            return Outcome(model_type, REFUSED, reason_of(refusal))
        return Outcome(model_type, NOT_BUILT, f"transformers computes no text with these sizes ({one_line(error)})")
    try:
        config = read_config(Checkpoint(folder).config)
    except ValueError as error:
        return Outcome(model_type, REFUSED, reason_of(error))
    except Exception as error:  # a mistake
        return Outcome(model_type, WRONG, f"{type(error).__name__}: {one_line(error)}")
    try:
        reason = compare(folder, oracle, expected)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
    if reason:
        return Outcome(model_type, WRONG, reason)
    return Outcome(model_type, NATIVE if isinstance(config, DecoderConfig) else THEIRS, groups=groups_of(config))


def write_checkpoint(model_type: str, folder: Path) -> Oracle:
    """Returns the network whose text is compared."""
    if model_type == "gemma3n":  # transformers builds the whole with timm only
        write_whole(folder / "whole", folder / "text")
        for file in (folder / "whole").iterdir():
            file.rename(folder / file.name)
        return Oracle(folder / "text")
    tiny_network(model_type).save_pretrained(folder)
    save_tokenizer(folder)
    return Oracle(folder)


def groups_of(config: AnyConfig) -> str:
    """The groups of a worker's layers, by the cache that they need."""
    groups = group_layers(needs_of(config, config.num_kv_heads), 16, min(config.max_model_len, LENGTH), torch.float32)
    names = [_group(group.window, group.chunked) if group.block_size else "states" for group in groups]
    if not groups:
        chunks = getattr(config, "chunks", ())
        names = [_group(config.sliding_window, bool(chunks) and all(chunks))]
    counts = Counter(names)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def _group(window: int | None, chunked: bool) -> str:
    return f"{'chunk' if chunked else 'window'} {window}" if window else "full"


def compare(folder: Path, oracle: Oracle, expected: torch.Tensor) -> str:
    """What differs, or "". expected: log-probabilities of PROMPT."""
    runner = load_runner(folder)
    for chunk_lens in ([len(PROMPT) - 1], [5, 1, 17, 13]):
        make_nan(runner.cache_engine.device_blocks)
        found = SteppedWorker(runner).prompt_logprobs(chunk_lens)
        difference = float((found - expected[:-1]).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(expected.abs().max()) / 10):
            return f"log-probabilities differ by {difference:.2g} in chunks of {chunk_lens}"
    if (difference := difference_of_embeddings(runner, oracle)) > TOLERANCE:
        return f"log-probabilities behind embeddings differ by {difference:.2g}"
    make_nan(runner.cache_engine.device_blocks)
    greedy, beside = oracle.greedy(PROMPT, NUM_TOKENS), oracle.greedy(PROMPT[:20], 4)
    found_tokens = generate_with_everything(SteppedWorker(runner), NUM_TOKENS)
    if found_tokens != (greedy, beside):
        return f"tokens are {found_tokens}, and transformers' {(greedy, beside)}"
    return ""


def difference_of_embeddings(runner: ModelRunner, oracle: Oracle) -> float:
    """The largest, for each unit of the largest logit, if the network reads embeddings in place of tokens."""
    if not runner.model.prompt_embeds_size:
        return 0.0
    embeddings = oracle.embed(PROMPT).clone()
    embeddings[6:12] = embeddings[6:12].flip(0) * 1.5
    make_nan(runner.cache_engine.device_blocks)
    items = (embeddings_item(embeddings[4:12], 4), embeddings_item(embeddings[20:37], 20))
    expected = oracle.logprobs_behind(embeddings)
    difference = float((SteppedWorker(runner).prompt_logprobs([8, 3, 16, 9], items) - expected[:-1]).abs().max())
    return difference / max(1.0, float(expected.abs().max()) / 10)


def one_line(error: Exception) -> str:
    """The beginning of a long text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON].rpartition(' ')[0]} …"


def reason_of(error: Exception) -> str:
    """A refusal without the type's name."""
    return re.sub(r"^a model \S+ is not supported: ", "", one_line(error))


def in_child(model_type: str) -> Outcome:
    """`check` in a forked process that ends after SECONDS."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        with tempfile.TemporaryDirectory() as folder, os.fdopen(writer, "w") as answer:
            outcome = check(model_type, Path(folder))
            answer.write(f"{outcome.status}\n{outcome.groups}\n{outcome.reason}")
        os._exit(0)
    os.close(writer)
    start = time.monotonic()
    with os.fdopen(reader) as answer:
        status, groups, reason = (*answer.read().split("\n", 2), "", "")[:3]
    _, code = os.waitpid(child, 0)
    if not status:
        return Outcome(model_type, WRONG, f"its process ended with {code} within {SECONDS} s")
    return Outcome(model_type, status, reason, groups, time.monotonic() - start)


def sweep(types: Sequence[str], processes: int) -> Iterator[Outcome]:
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(in_child, types)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: one line for types with the same outcome."""
    lines = [
        f"With transformers {transformers.__version__}, {len(outcomes)} types:\n",
        "| outcome | groups | number | types |",
        "|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.status, outcome.groups, outcome.reason), []).append(outcome.model_type)
    order = (NATIVE, THEIRS, WRONG, REFUSED, NOT_BUILT)
    for (status, groups, reason), types in sorted(
        rows.items(), key=lambda row: (order.index(row[0][0]), row[0][1].count("+"), row[0][1], row[1])
    ):
        said = f"{status}: {reason}" if reason else status
        named = ", ".join(f"`{name}`" for name in types)
        lines.append(f"| {said.replace('|', '&#124;')} | {groups} | {len(types)} | {named} |")
    return "\n".join(lines) + "\n"


def read_table(page: str) -> dict[str, Outcome]:
    """The outcomes in docs/models.md, by type."""
    found: dict[str, Outcome] = {}
    for line in page.splitlines():
        said, groups, _, types = (
            (cell.strip() for cell in line.strip("|").split(" | ")) if line.count(" | ") == 3 else ("", "", "", "")
        )
        status, _, reason = said.partition(": ")
        for name in re.findall(r"`([\w-]+)`", types) if status in (NATIVE, THEIRS, REFUSED, NOT_BUILT) else ():
            found[name] = Outcome(name, status, reason.replace("&#124;", "|"), groups)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=TYPES, help="types to compare (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table of docs/models.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes at a time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    start, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        check("olmo", Path(folder))  # imports most modules, which forked processes need not import again
    for outcome in sweep(options.types, options.processes):
        said = outcome.reason or outcome.groups
        print(f"{outcome.model_type:28} {outcome.status:20} {outcome.seconds:5.1f} s  {said}", flush=True)
        outcomes.append(outcome)
    totals = Counter(outcome.status for outcome in outcomes)
    print(", ".join(f"{count} {status}" for status, count in totals.items()), f"in {time.monotonic() - start:.0f} s")
    if options.write:
        page = PAGE.read_text()
        every = read_table(page) | {outcome.model_type: outcome for outcome in outcomes}
        rows = table([every[name] for name in TYPES])
        PAGE.write_text(TABLE.sub(lambda found: found[1] + rows + found[2], page))
    return totals[WRONG] > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
