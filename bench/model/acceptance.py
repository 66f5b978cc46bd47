"""Measures, on the logits of real texts, how often a draft model's token is accepted under three rules.

python -m bench acceptance --model TARGET --draft-model DRAFT [--temperature 1.0] [--texts 12]

The texts are functions in this project's sources. p and q are the target's and the draft's probabilities of the next
token.

- Shared noise, the rule of `draft_model`: both models add the same Gumbel noise to logits / temperature and choose
  the largest sum. Measured with the worker's sampler. At least (1 - d) / (1 + d) with d = 1 - sum(min(p, q)) (Daliri,
  Musco and Suresh, 2024).
- Independent draws: sum(p q).
- The ratio test (Leviathan, Kalman and Matias 2023): sum(min(p, q)), the maximum of all rules; only here do outputs
  depend on the draft model.
"""

import argparse
import itertools
import sys
from array import array
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.model.speculation import edits
from worker_service.execution.sampling.sampler import sample
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import TOKENS, SamplingParams

DRAWS = 32
SKIPPED = 32
"""Positions at the beginning of each text, not measured for lack of context."""
TOKENS_OF_A_TEXT = 160


def logits_of(name: str, texts: list[list[int]]) -> list[Tensor]:
    """A model's logits for each text, [positions, vocabulary_size]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0, SKIPPED:].float() for text in texts]


def draws(logits: Tensor, temperature: float, position: int) -> Tensor:
    """One token for each seed from the logits of one position, [vocabulary_size]."""
    sequences = [
        SequenceState(
            1,
            array(TOKENS, bytes(8 * position)),
            1,
            0,
            array(TOKENS),
            SamplingParams(temperature=temperature, seed=seed),
        )
        for seed in range(DRAWS)
    ]
    return sample(logits.expand(DRAWS, -1).contiguous(), sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--texts", type=int, default=12)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids[:TOKENS_OF_A_TEXT] for text in itertools.islice(edits(), arguments.texts)]
    pairs = zip(logits_of(arguments.model, texts), logits_of(arguments.draft_model, texts), strict=True)
    shared: list[Tensor] = []
    own: list[Tensor] = []
    ratio: list[Tensor] = []
    for target, draft in pairs:
        width = min(target.shape[1], draft.shape[1])
        target, draft = target[:, :width], draft[:, :width]
        p, q = ((logits / arguments.temperature).softmax(-1) for logits in (target, draft))
        own.append((p * q).sum(-1))
        ratio.append(torch.minimum(p, q).sum(-1))
        for position, (of_target, of_draft) in enumerate(zip(target, draft, strict=True), SKIPPED):
            agree = draws(of_target, arguments.temperature, position) == draws(
                of_draft, arguments.temperature, position
            )
            shared.append(agree.float().mean())
    kept = torch.cat(ratio)
    found = {
        "shared noise": torch.stack(shared),
        "its lower bound": kept / (2 - kept),
        "draws of its own": torch.cat(own),
        "the ratio test": kept,
    }
    sys.stdout.write(f"{len(kept)} positions, temperature {arguments.temperature:g}\n")
    for name, rates in found.items():
        sys.stdout.write(f"{name:16}: {rates.mean():.3f}\n")


if __name__ == "__main__":
    main()
