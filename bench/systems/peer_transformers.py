"""The peer that is always installed: transformers' `generate`, in static batches in one process, without a server."""

import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.loads.load import Load


class Transformers:
    name = "transformers"

    def __init__(self, directory: Path, *, random_weights: bool = False) -> None:
        """random_weights: the directory has only config.json."""
        if random_weights:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._model = model.eval()

    @torch.inference_mode()
    def output_tokens_per_second(self, load: Load) -> float:
        """Output tokens per second of a static batch of `concurrency` prompts of equal length, after a warm-up."""
        prompts = torch.tensor(load.prompts(self._model.config.vocab_size, 0)[: load.concurrency])
        output_tokens = load.arrivals[0].output_tokens
        self._generate(prompts, 4)
        began = time.perf_counter()
        self._generate(prompts, output_tokens)
        return load.concurrency * output_tokens / (time.perf_counter() - began)

    def _generate(self, prompts: torch.Tensor, num_tokens: int) -> None:
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
        )
