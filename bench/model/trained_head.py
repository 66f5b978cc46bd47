"""Trains an EAGLE-3 draft head on a model's outputs, in minutes on two CPU cores. Only for the Llama family.

python -m bench trained_head FOLDER [--model default] [--prompts FILE] [--outputs 240] [--epochs 6]

A server answers prompts about source files that `bench speculation` does not use. With --prompts, it also answers the
prompts of a file in MT-bench's format. The head starts as the model's last layer and learns the model's probabilities.
As when it drafts several tokens, its inputs for later drafts are its own hidden states ("EAGLE-3: Scaling up Inference
Acceleration of Large Language Models via Training-Time Test", Li et al., 2025). A tenth of the answers is held out, to
measure how often drafts are right.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.model.speculation import edits
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from worker_service.loading.model_store import find_model

DEPTH = 3
"""Consecutive drafts that the head learns to predict."""
LEARNING_RATE = 1e-3
SEED = 0
Pair = tuple[Tensor, Tensor]

NAMES = {
    "fc": "fc",
    "norm": "norm",
    "lm_head": "lm_head",
    **{one: f"midlayer.{one}" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
    **{one: f"midlayer.self_attn.{one}_proj" for one in "qkvo"},
    **{one: f"midlayer.mlp.{one}_proj" for one in ("gate", "up", "down")},
}
"""Weights' names in a checkpoint of EAGLE-3's authors."""


@dataclass(frozen=True)
class Example:
    """One text, with the model's results at each token.

    Tokens [n], the hidden states of three layers side by side [n, 3 * hidden_size], the final normalised hidden states
    [n, hidden_size], and the likeliest next tokens [n].
    """

    token_ids: Tensor
    states: Tensor
    last: Tensor
    likeliest: Tensor


class Head(nn.Module):
    """The network of `worker_service.models.decoders.eagle`, trainable."""

    def __init__(self, target: Any, token_ids: Tensor) -> None:
        """`target` is transformers' Llama model. `token_ids` [guessable] are the tokens with a logit."""
        super().__init__()
        config, layer = target.config, target.model.layers[-1]
        hidden = config.hidden_size
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // self.num_heads
        self.eps = config.rms_norm_eps
        self.rotary = target.model.rotary_emb
        self.embedding = target.model.embed_tokens.weight.detach()
        self.of_target = target.lm_head.weight.detach()[token_ids].float()

        def weight(of: Any) -> nn.Parameter:
            return nn.Parameter(of.weight.detach().float().clone())

        def doubled(of: Any) -> nn.Parameter:
            own = of.weight.detach().float()
            return nn.Parameter(torch.cat([torch.zeros_like(own), own], dim=1))

        attention, mlp = layer.self_attn, layer.mlp
        # The last of the three states is most similar to the last layer's usual input. The weights for the other two
        # start at zero.
        nothing = torch.zeros(hidden, hidden)
        self.weights = nn.ParameterDict(
            {
                "fc": nn.Parameter(torch.cat([nothing, nothing, torch.eye(hidden)], dim=1)),
                "norm": weight(target.model.norm),
                "lm_head": nn.Parameter(target.lm_head.weight.detach()[token_ids].float().clone()),
                "hidden_norm": weight(layer.input_layernorm),
                "input_layernorm": weight(layer.input_layernorm),
                "post_attention_layernorm": weight(layer.post_attention_layernorm),
                "q": doubled(attention.q_proj),
                "k": doubled(attention.k_proj),
                "v": doubled(attention.v_proj),
                "o": weight(attention.o_proj),
                "gate": weight(mlp.gate_proj),
                "up": weight(mlp.up_proj),
                "down": weight(mlp.down_proj),
            }
        )

    def combine(self, states: Tensor) -> Tensor:
        return self._linear(states, "fc")

    def forward(
        self, token_ids: Tensor, states: Tensor, depth: int, earlier: Sequence[Pair]
    ) -> tuple[Tensor, Tensor, Pair]:
        """Compute, for all positions of a text at once, the draft number `depth` after the position.

        `token_ids` [places] follow the positions of the hidden `states` [places, hidden_size]. `earlier` are the keys
        and values of smaller depths. At the first depth, the states come from the model, and a position attends to all
        up to itself; at a larger depth, to itself only among the keys of this depth. Returns new states, logits, and
        new keys and values.
        """
        normed = self._norm(states, "hidden_norm")
        x = torch.cat([self._norm(self.embedding[token_ids].float(), "input_layernorm"), normed], dim=1)
        places = torch.arange(depth, depth + len(x))
        cos, sin = (table[0] for table in self.rotary(x, places[None]))
        query, key, value = (self._linear(x, name).view(len(x), -1, self.head_dim) for name in "qkv")
        query, key = (self._rotated(part, cos, sin) for part in (query, key))
        times = self.num_heads // self.num_kv_heads
        key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        pairs = [*earlier, (key, value)]
        scores = torch.einsum("qhd,khd->hqk", query, pairs[0][0])
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        own = [(query * keys).sum(-1).T[..., None] for keys, _ in pairs[1:]]
        shares = (torch.cat([scores, *own], dim=2) * self.head_dim**-0.5).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares[..., : len(x)], pairs[0][1])
        for number, (_, values) in enumerate(pairs[1:]):
            attended = attended + shares[..., len(x) + number].T[..., None] * values
        x = states + self._linear(attended.flatten(1), "o")
        inner = self._norm(x, "post_attention_layernorm")
        x = x + self._linear(functional.silu(self._linear(inner, "gate")) * self._linear(inner, "up"), "down")
        return x, self._linear(self._norm(x, "norm"), "lm_head"), pairs[-1]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[1:], self.weights[name], self.eps)

    @staticmethod
    def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@torch.no_grad()
def read(target: Any, token_ids: Sequence[int]) -> Example:
    tokens, num_layers = torch.tensor(token_ids), target.config.num_hidden_layers
    found = target.model(tokens[None], output_hidden_states=True)
    states = torch.cat([found.hidden_states[number][0] for number in states_before(num_layers)], dim=1)
    last = found.last_hidden_state[0]
    return Example(tokens, states, last, target.lm_head(last).argmax(-1))


def states_before(num_layers: int) -> list[int]:
    """The three layers whose inputs the head reads, as in the EAGLE-3 paper; fewer in a small model."""
    return [min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)]


def losses(head: Head, example: Example, index: Tensor) -> tuple[Tensor, list[float]]:
    """The mean loss over all depths, and the share of right drafts at each depth.

    `index` [vocabulary_size] is each token's place among the head's logits, negative without one. A draft is right if
    it is the model's likeliest token.
    """
    num_places = len(example.token_ids) - 1 - DEPTH
    states = head.combine(example.states[:num_places].float())
    earlier: list[Pair] = []
    total, right = torch.zeros(()), []
    with torch.no_grad():
        wanted = (example.last.float() @ head.of_target.T).softmax(-1)
    for depth in range(DEPTH):
        behind = slice(depth + 1, depth + 1 + num_places)
        states, logits, pair = head(example.token_ids[behind], states, depth, earlier)
        earlier.append(pair)
        total = total + functional.cross_entropy(logits, wanted[behind])
        right.append((logits.argmax(-1) == index[example.likeliest[behind]]).float().mean().item())
    return total / DEPTH, right


def train(
    target: Any,
    texts: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    folder: Path,
    num_guessable: int,
    epochs: int,
) -> list[float]:
    """Train the head, and write it in EAGLE-3's format. Returns the share of right drafts at each depth."""
    torch.manual_seed(SEED)
    counts = Counter(token for text in texts for token in text)
    size = target.config.vocab_size
    frequent = sorted(range(size), key=lambda token: (-counts[token], token))[:num_guessable]
    token_ids = torch.tensor(sorted(frequent))
    index = torch.full((size,), -1).index_put_((token_ids,), torch.arange(len(token_ids)))
    examples = [read(target, text) for text in texts if len(text) > DEPTH + 2]
    head = Head(target, token_ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    num_steps = epochs * len(examples)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps + 1, pct_start=0.05)
    draw, began = random.Random(SEED), time.monotonic()
    for epoch in range(epochs):
        draw.shuffle(examples)
        seen = []
        for example in examples:
            loss, _ = losses(head, example, index)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append(loss.item())
        sys.stderr.write(f"epoch {epoch + 1}: loss {sum(seen) / len(seen):.3f}, {time.monotonic() - began:.0f} s\n")
    save(head, target, token_ids, folder)
    with torch.no_grad():
        unseen = [read(target, text) for text in held_out if len(text) > DEPTH + 2]
        return torch.tensor([losses(head, example, index)[1] for example in unseen]).mean(0).tolist()


def save(head: Head, target: Any, token_ids: Tensor, folder: Path) -> None:
    config = target.config
    tensors = {f"{NAMES[name]}.weight": weight.detach().to(target.dtype) for name, weight in head.weights.items()}
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    tensors["t2d"] = torch.zeros(config.vocab_size).index_fill_(0, token_ids, 1).bool()
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters")  # fmt: skip
    written = {name: getattr(config, name) for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": head.head_dim,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(token_ids),
        "eagle_aux_hidden_state_layer_ids": states_before(config.num_hidden_layers),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    save_file(tensors, folder / "model.safetensors")


def questions(file: Path) -> Iterator[str]:
    for line in file.read_text().splitlines():
        yield from json.loads(line)["turns"][:1]


async def ask(target: str, prompts: Sequence[Any], max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt with its answer. Half of the answers are greedy."""
    places = asyncio.Semaphore(32)
    async with Client(target) as client:
        await client.wait_until_serving(600)

        async def answer(number: int, prompt: Any) -> list[int]:
            temperature = 0.8 * (number % 2)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
            async with places:
                token_ids = await client.tokenize(prompt)
                found = await collect(client, token_ids, sampling)
            return [*token_ids, *found.outputs[0].token_ids]

        return await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=Path, help="a file in the format of MT-bench's questions")
    parser.add_argument("--outputs", type=int, default=240)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--guessable", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM

    sources: list[Any] = [*edits("worker_service", "kernels", "pagewire_client", "pagewire_common")]
    if arguments.prompts is not None:
        sources += [[{"role": "user", "content": question}] for question in questions(arguments.prompts)]
    random.Random(SEED).shuffle(sources)
    path = find_model(arguments.model, Path("~/.cache/pagewire").expanduser()).path
    target = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    if target.config.model_type != "llama":
        sys.exit(f"{arguments.model} is no Llama, and heads are trained for these alone")
    num_held_out = len(sources) // 10
    others = sources[num_held_out:]
    prompts = sources[:num_held_out] + [others[number % len(others)] for number in range(arguments.outputs)]
    began = time.monotonic()
    with LocalServer(arguments.model, worker_arguments=["--max-model-len", "2048", "--no-forms"]) as server:
        texts = asyncio.run(ask(server.target, prompts, arguments.max_tokens))
    sys.stderr.write(f"{sum(map(len, texts))} tokens of {len(texts)} texts, {time.monotonic() - began:.0f} s\n")
    held_out, texts = texts[:num_held_out], texts[num_held_out:]
    right = train(target, texts, held_out, arguments.folder, arguments.guessable, arguments.epochs)
    sys.stdout.write(f"held out, right by depth: {', '.join(f'{share:.1%}' for share in right)}\n")


if __name__ == "__main__":
    main()
