"""How near a worker's decode steps come to what the GPU's memory allows: python -m bench.steps_gpu. Ends with JSON.

A worker with the shape of Llama 3 8B and random weights in bf16 computes steps of 1, 32 and 256 sequences with 1,024
tokens of context: session, batch, CUDA graph, greedy sampling and the tokens read back; protobuf and gRPC are left out.
The limit is the time to read the weights that a step needs, and the keys and values of its sequences, once, at the
bandwidth of a copy that is measured in the same run. Times are from one answer to the next, and figures are medians
over steps. For "step" each step is launched before the previous one has finished, as when a scheduler sends steps
ahead; for "alone" it is launched afterwards.
"""

import json
import statistics
import sys
import time
from array import array
from itertools import pairwise

import torch

from bench.kernels_gpu import copy_bandwidth
from worker_service.execution.cache_engine import CacheEngine, CacheShape
from worker_service.execution.decode_graphs import DecodeGraphs
from worker_service.execution.model_runner import ModelRunner, RunningStep
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.models.registry import build_model, read_config
from worker_service.session.session import Session
from worker_service.session.step import TOKENS, Limits, NewSequence, SamplingParams, SchedulerOutput

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BATCHES = (1, 32, 256)
CONTEXT = 1024
NUM_STEPS = 24
BLOCK_SIZE = 16


def main() -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        sys.exit("bench.steps_gpu measures steps on an NVIDIA GPU, and torch finds none on this machine.")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    torch.cuda.empty_cache()
    config = read_config(LLAMA_3_8B)
    model = build_model(config, torch.bfloat16, device)
    tensors = model.checkpoint_tensors()
    DummyWeights(device).load_into(tensors)
    model.pack()
    weight_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if "embed" not in name)
    shape = CacheShape(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.bfloat16)
    blocks_each = -(-(CONTEXT + NUM_STEPS + 1) // BLOCK_SIZE)
    limits = Limits(BLOCK_SIZE, max(BATCHES) * blocks_each, 0, config.vocabulary_size, 8192, 2048, max(BATCHES))
    engine = CacheEngine(shape, limits.num_device_blocks, 0, device)
    for part in torch.split(engine.device_blocks, 512):
        part.normal_()
    began = time.perf_counter()
    graphs = DecodeGraphs(model, engine.device_blocks, limits.max_num_seqs, limits.max_model_len)
    capture_seconds = time.perf_counter() - began
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: copy {bandwidth / 1e9:.0f} GB/s")
    say(f"weights {weight_bytes / 1e9:.1f} GB; graphs captured in {capture_seconds:.1f} s")
    say(f"{'sequences':>9}{'limit':>10}{'step':>10}{'ratio':>7}{'alone':>10}{'ratio':>7}{'alone, without graphs':>23}")
    results = []
    for batch in BATCHES:
        step = measure(ModelRunner(model, engine, graphs), limits, batch, ahead=True)
        alone = measure(ModelRunner(model, engine, graphs), limits, batch)
        eager = measure(ModelRunner(model, engine), limits, batch)
        context_bytes = (CONTEXT + NUM_STEPS // 2) * shape.block_bytes // BLOCK_SIZE
        limit = 1e3 * (weight_bytes + batch * context_bytes) / bandwidth
        say(
            f"{batch:>9}{limit:>7.2f} ms{step:>7.2f} ms{step / limit:>7.2f}{alone:>7.2f} ms{alone / limit:>7.2f}"
            f"{eager:>20.2f} ms"
        )
        results.append({"batch": batch, "limit_ms": limit, "step_ms": step, "alone_ms": alone, "eager_ms": eager})
    say(
        json.dumps({"device": torch.cuda.get_device_name(device), "copy_bytes_per_second": bandwidth, "steps": results})
    )


def measure(runner: ModelRunner, limits: Limits, batch: int, ahead: bool = False) -> float:
    """Median milliseconds from the end of a step to the end of the next one."""
    session = Session(1, limits)
    blocks = torch.randperm(limits.num_device_blocks, generator=torch.Generator().manual_seed(0))
    new = tuple(
        NewSequence(
            sequence_id=number,
            token_ids=array(TOKENS, range(CONTEXT)),
            num_prompt_tokens=CONTEXT - 1,
            num_computed_tokens=CONTEXT - 1,
            block_ids=array(TOKENS, table),
            sampling=SamplingParams(),
        )
        for number, table in enumerate(blocks.view(max(BATCHES), -1)[:batch].tolist())
    )
    ids, ones, samples = tuple(range(batch)), (1,) * batch, (True,) * batch
    running: RunningStep | None = None
    ends = []
    for step_id in range(1, NUM_STEPS + 1):
        output = SchedulerOutput(1, step_id, new if step_id == 1 else (), ids, ones, samples)
        assert step_id == 1 or session.follows_unseen(output)
        if running is not None and not ahead:
            ends.append(finish(session, running))
            running = None
        chunks = session.apply(output)
        before, running = running, runner.launch(output, chunks, running)
        session.advance(chunks)
        if before is not None:
            ends.append(finish(session, before))
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(ends[4:]))


def finish(session: Session, running: RunningStep) -> float:
    """Returns the time at which the step ended."""
    session.fill_in(running.chunks, running.finish().token_ids)
    return time.perf_counter()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
