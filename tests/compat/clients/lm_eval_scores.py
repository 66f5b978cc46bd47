"""lm-eval's `local-completions`: log-likelihoods of texts and of token ids are those of transformers in float32."""

import math
import os

import torch
from checks import MODEL, URL, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = os.environ["PAGEWIRE_FOLDER"]
PAIRS = [
    ("The capital of France is", " Paris, on the Seine."),
    ("def add(a, b):", "\n    return a + b\n"),
    ("2 + 2 =", " 5"),
]
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


class TextPrompts(LocalCompletionsAPI):
    """Sends texts, in which special tokens are read as such."""

    def _create_payload(self, *given: object, **more: object) -> dict[str, object]:
        return super()._create_payload(*given, **more) | {"parse_special_tokens": True}


def api(kind: type[LocalCompletionsAPI], **more: object) -> LocalCompletionsAPI:
    asked = {"base_url": f"{URL}/v1/completions", "model": MODEL, "tokenizer": FOLDER, "max_length": 512}
    return kind(**asked | {"tokenizer_backend": "huggingface", "batch_size": 2, "num_concurrent": 1} | more)


def likelihood(prompt: list[int], rest: list[int]) -> float:
    with torch.inference_mode():
        found = model(torch.tensor([prompt + rest])).logits[0].float().log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(rest) - 1)
    return float(sum(found[place, token] for place, token in zip(places, rest, strict=True)))


def log_likelihoods() -> None:
    for kind, is_ids in ((LocalCompletionsAPI, True), (TextPrompts, False)):
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
        found = api(kind, tokenized_requests=is_ids).loglikelihood(requests, disable_tqdm=True)
        for (prompt, rest), (value, _) in zip(PAIRS, found, strict=True):
            ids = tokenizer(prompt + rest)["input_ids"]
            first = len(tokenizer(prompt)["input_ids"])
            expected = likelihood(ids[:first], ids[first:])
            assert math.isclose(value, expected, abs_tol=1e-4), (is_ids, rest, value, expected)


def rolling() -> None:
    for kind, is_ids in ((LocalCompletionsAPI, True), (TextPrompts, False)):
        evaluator = api(kind, tokenized_requests=is_ids)
        text = " ".join(rest for _, rest in PAIRS)
        (value,) = evaluator.loglikelihood_rolling(
            [Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True
        )
        expected = likelihood([evaluator.prefix_token_id], tokenizer(text)["input_ids"])
        assert math.isclose(value, expected, abs_tol=1e-4), (is_ids, value, expected)


run(log_likelihoods, rolling)
