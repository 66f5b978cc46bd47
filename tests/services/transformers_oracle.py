"""The outputs of transformers, found without generating."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def likeliest_tokens(directory: Path, prompts: Sequence[str], outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' likeliest token in float32 after each prompt, and after each token of its output.

    If these equal the output, transformers generates the same. One pass for each prompt takes a tenth of the time.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    likeliest = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(
                torch.cat([tokens, torch.tensor([output[:-1]])], dim=1), logits_to_keep=len(output), use_cache=False
            ).logits
        likeliest.append(logits[0].argmax(dim=-1).tolist())
    return likeliest
