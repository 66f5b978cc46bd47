"""Draft heads in plain code: everything is computed anew for each draft, from transformers' states."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

INNER, HEADS, KV_HEADS, HEAD_DIM = 40, 4, 2, 10


def write_head(
    folder: Path,
    *,
    layer_name: str = "midlayer",
    family: str = "llama",
    bias: bool = False,
    hidden: int = 48,
    vocabulary: int = 131,
    num_guessable: int | None = None,
    own_embedding: bool = False,
    **config: Any,
) -> Path:
    """A head of random weights for the tiny models, in speculators' format if the layer's name is `layers.0`."""
    num_guessable = num_guessable or vocabulary
    draw = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * 0.3

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=draw) * 0.2

    projections = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    layer = {f"{name}.weight": matrix(*shape) for name, shape in projections.items()}
    if bias:
        layer |= {f"{name}.bias": matrix(shape[0]) for name, shape in projections.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        layer[f"{name}.weight"] = norm(hidden)
    if family == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
    tensors = {f"{layer_name}.{name}": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(num_guessable, hidden),
    }
    if num_guessable < vocabulary:
        chosen = torch.randperm(vocabulary, generator=draw)[:num_guessable].sort().values
        tensors["d2t"] = chosen - torch.arange(num_guessable)
        tensors["t2d"] = torch.zeros(vocabulary).index_fill_(0, chosen, 1).bool()
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocabulary, hidden)
    sizes = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "attention_bias": bias,
        "mlp_bias": bias,
    }
    is_speculators = layer_name == "layers.0"
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": sizes} if is_speculators else sizes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole | {"draft_vocab_size": num_guessable} | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_mtp(folder: Path, qwen2: Path) -> Path:
    """A Qwen2 checkpoint as one of MiMo, with a random layer for multi-token prediction."""
    shutil.copytree(qwen2, folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    draw = torch.Generator().manual_seed(9)
    shapes = {
        "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.q_proj.bias": (heads,),
        "self_attn.k_proj.bias": (kv_heads,),
        "self_attn.v_proj.bias": (kv_heads,),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    layer = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    layer |= {f"{name}.weight": 1 + torch.randn(hidden, generator=draw) * 0.2 for name in norms}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    changes = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


class SlowHead:
    """A target and its head."""

    def __init__(self, target: Path, weights: dict[str, Tensor], sizes: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        self.num_layers = self.target.config.num_hidden_layers
        self.weights = weights
        self.head_dim, self.eps = sizes["head_dim"], sizes["rms_norm_eps"]
        self.times = sizes["num_attention_heads"] // sizes["num_key_value_heads"]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], guessed: Sequence[int] = ()) -> Tensor:
        """The head's logits behind the tokens and the drafts so far, [vocabulary_size]."""
        states = self.states(token_ids[:-1])
        for number in range(len(guessed) + 1):
            found = self.compute([*token_ids[1:], *guessed[:number]], states)
            states = torch.cat([states, found[-1:]])
        return self.logits_of(found[-1])

    def greedy(self, token_ids: Sequence[int], number: int) -> list[int]:
        guessed: list[int] = []
        for _ in range(number):
            guessed.append(int(self.logits(token_ids, guessed).argmax()))
        return guessed

    def states(self, token_ids: Sequence[int]) -> Tensor:
        """The target's states for the head, [tokens, hidden_size]."""
        raise NotImplementedError

    def compute(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        """The head's own states of tokens that follow those of `states`."""
        raise NotImplementedError

    def logits_of(self, state: Tensor) -> Tensor:
        raise NotImplementedError

    def layer(self, x: Tensor, residual: Tensor) -> Tensor:
        query, key, value = (
            self.linear(x, f"self_attn.{name}_proj").view(len(x), -1, self.head_dim).transpose(0, 1) for name in "qkv"
        )
        if "self_attn.q_norm.weight" in self.weights:
            query, key = self.norm(query, "self_attn.q_norm"), self.norm(key, "self_attn.k_norm")
        key, value = (part.repeat_interleave(self.times, dim=0) for part in (rotated(key), value))
        scores = rotated(query) @ key.transpose(1, 2) / self.head_dim**0.5
        scores += torch.full_like(scores, -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = residual + self.linear(attended, "self_attn.o_proj")
        inner = self.norm(x, "post_attention_layernorm")
        gated = functional.silu(self.linear(inner, "mlp.gate_proj")) * self.linear(inner, "mlp.up_proj")
        return x + self.linear(gated, "mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]


class SlowEagle(SlowHead):
    def __init__(self, target: Path, head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        layer = "layers.0." if "transformer_layer_config" in config else "midlayer."
        weights = {key.removeprefix(layer): value for key, value in load_file(head / "model.safetensors").items()}
        super().__init__(target, weights, config.get("transformer_layer_config", config))
        self.normed_residual = config.get("norm_before_residual", False)
        name = "eagle_aux_hidden_state_layer_ids"
        behind = config.get("eagle_config", {}).get(name)  # of layers whose outputs are read
        default = [2, self.num_layers // 2, self.num_layers - 3]
        self.middle = (config.get(name) or default) if behind is None else [number + 1 for number in behind]

    def states(self, token_ids: Sequence[int]) -> Tensor:
        last: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        found = self.target(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        hook.remove()
        by_layer = [*found[:-1], last[0]]  # what transformers gives for the last layer is normalised
        return self.linear(torch.cat([by_layer[number][0] for number in self.middle], dim=1), "fc")

    def compute(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        own = self.weights.get("embed_tokens.weight")
        embedded = (self.target.model.embed_tokens.weight if own is None else own)[torch.tensor(token_ids)]
        normed = self.norm(states, "hidden_norm")
        x = torch.cat([self.norm(embedded, "input_layernorm"), normed], dim=1)
        return self.layer(x, normed if self.normed_residual else states)

    def logits_of(self, state: Tensor) -> Tensor:
        logits = self.linear(self.norm(state, "norm"), "lm_head")
        if "d2t" not in self.weights:
            return logits
        whole = torch.full((self.target.config.vocab_size,), -torch.inf)
        whole[torch.arange(len(logits)) + self.weights["d2t"]] = logits
        return whole


class SlowMtp(SlowHead):
    def __init__(self, qwen2: Path, mimo: Path) -> None:
        """`qwen2`: the same model for transformers."""
        whole, name = load_file(mimo / "model.safetensors"), "model.mtp_layers.0."
        weights = {key.removeprefix(name): value for key, value in whole.items() if key.startswith(name)}
        super().__init__(qwen2, weights, json.loads((mimo / "config.json").read_text()))

    def states(self, token_ids: Sequence[int]) -> Tensor:
        found = self.target(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return found[-1][0]

    def compute(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        embedded = self.target.model.embed_tokens.weight[torch.tensor(token_ids)].clone()
        embedded[0] = 0
        x = torch.cat([self.norm(states, "hidden_layernorm"), self.norm(embedded, "token_layernorm")], dim=1)
        residual = self.linear(x, "input_proj")
        return self.norm(self.layer(self.norm(residual, "input_layernorm"), residual), "final_layernorm")

    def logits_of(self, state: Tensor) -> Tensor:
        return self.target.lm_head(state)


def rotated(x: Tensor) -> Tensor:
    """x: [heads, tokens, head_dim]."""
    frequencies = 1e4 ** (-torch.arange(0, x.shape[2], 2) / x.shape[2])
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
