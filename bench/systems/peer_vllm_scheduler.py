"""Measures the CPU time of vLLM's scheduler. `bench scheduler` runs it with a Python that can import vllm.

The argument is a `bench.planning.scheduler.Load` as JSON. Prints vLLM's version, then for each number of running
sequences on stdin the mean microseconds of a step.

The V1 scheduler is constructed as in vLLM's engine core, with prefix caching and without statistics, for a model of one
layer that is never loaded. As in pagewire's measurement, every answer arrives before the next step is planned (no
asynchronous scheduling), was prepared before, and outputs are searched for stop tokens.
"""

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import enable_envs_cache
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
}
STOP_TOKEN, TOKEN = 2, 7


def make_scheduler(load: dict[str, Any], num_seqs: int) -> Any:
    """`num_seqs` running sequences whose prompts have been computed."""
    num_blocks = num_seqs * load["num_blocks_each"]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=load["block_size"],
            enable_prefix_caching=True,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(load["max_num_batched_tokens"], num_seqs),
            async_scheduling=False,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=load["block_size"], num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=load["block_size"],
    )
    assert scheduler.kv_cache_manager.enable_caching
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(load["block_size"], hash_fn)
    for number in range(num_seqs):
        sampling = vllm.SamplingParams(max_tokens=8192, stop_token_ids=[STOP_TOKEN])
        prompt = list(range(number, number + load["prompt_tokens"]))
        scheduler.add_request(Request(str(number), prompt, sampling, None, block_hasher=hasher))
    while len(scheduler.running) < num_seqs or any(not request.num_output_tokens for request in scheduler.running):
        output = scheduler.schedule()
        samples = [
            [TOKEN] if request.num_computed_tokens >= request.num_prompt_tokens else []
            for request in (scheduler.requests[name] for name in output.num_scheduled_tokens)
        ]
        scheduler.update_from_output(output, answer_of(output, samples))
    return scheduler


def answer_of(output: Any, sampled: list[list[int]]) -> Any:
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)


def us_per_step(load: dict[str, Any], scheduler: Any, answer: Any) -> float:
    began = time.perf_counter()
    for _ in range(load["num_steps"]):
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer)
    seconds = time.perf_counter() - began
    assert output.total_num_scheduled_tokens == len(answer.req_ids) == len(scheduler.running)
    return float(1e6 * seconds / load["num_steps"])


def main() -> None:
    load = json.loads(sys.argv[1])
    enable_envs_cache()  # as vLLM's engine core does
    sys.stdout.write(f"{vllm.__version__}\n")
    sys.stdout.flush()
    size = 0
    for line in sys.stdin:
        if size != int(line):
            size = int(line)
            scheduler = make_scheduler(load, size)
            output = scheduler.schedule()
            answer = answer_of(output, [[TOKEN]] * size)
            scheduler.update_from_output(output, answer)
            gc.collect()
            gc.freeze()  # as vLLM's engine core does
        sys.stdout.write(f"{us_per_step(load, scheduler, answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
