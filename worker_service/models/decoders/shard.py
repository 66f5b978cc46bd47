"""The part of a network that one rank holds with tensor parallelism (Shoeybi et al., 2019).

Input projections are split by outputs (heads or inner units) and output projections by inputs, so each half of a layer
needs one sum over the ranks; experts likewise. Routers are whole. Embedding and head are split by tokens, being a
rank's largest weights otherwise, at the cost of one more sum of a vector per token. An adapter is split like its
projection: B by outputs, or A by inputs, with its product added before the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from pagewire_common.start_error import StartError
from worker_service.models.causal_model import ModelConfig
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.mlp import SHARED_EXPERTS
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.parallel.ranks import Ranks

_ALIGNMENT = 16
"""Divisor of a rank's inner units if possible, because products of odd sizes are slow."""


@dataclass(frozen=True)
class Shard:
    """A rank's heads, inner units and vocabulary tokens, as ranges."""

    heads: range
    kv_heads: range
    inner: range
    """Inner units of dense feed-forward networks."""
    expert_inner: range
    """Inner units of each expert; empty without experts."""
    shared_inner: range
    """Inner units of the shared experts; empty without shared experts."""
    vocabulary: range

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, size: int) -> "Shard":
        """The shard of one rank. Raises StartError if the network cannot be split. Key-value heads stay with their
        query heads. If ranks outnumber key-value heads, ranks share them and split the query heads."""
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        group, copies = num_heads // num_kv_heads, max(1, size // num_kv_heads)
        if size > num_kv_heads and (size % num_kv_heads or copies > group):
            raise StartError(
                f"--tensor-parallel-size is {size}, and {num_heads} heads that share {num_kv_heads} key-value heads "
                f"cannot be split so: it may be up to {num_kv_heads}, or a multiple of {num_kv_heads} "
                f"up to {num_heads}"
            )
        mixture = config.mixture
        of_experts = (0, 0) if mixture is None else (mixture.intermediate_size, mixture.shared_size)
        least = min(units for units in (config.intermediate_size, *of_experts) if units)
        if size > least:
            raise StartError(f"--tensor-parallel-size is {size}, above the intermediate size {least}")
        kv_heads = _stretch(num_kv_heads, rank // copies, size // copies)
        of_a_head = _stretch(group, rank % copies, copies) if copies > 1 else range(group * len(kv_heads))
        first = group * kv_heads.start + of_a_head.start
        inner, expert_inner, shared_inner = (
            _inner(units, rank, size) for units in (config.intermediate_size, *of_experts)
        )
        tokens = -(-config.vocabulary_size // size)  # equal on all ranks but the last, so that logits can be joined
        return cls(
            range(first, first + len(of_a_head)),
            kv_heads,
            inner,
            expert_inner,
            shared_inner,
            range(min(rank * tokens, config.vocabulary_size), min((rank + 1) * tokens, config.vocabulary_size)),
        )

    def cuts(self, config: DecoderConfig) -> Mapping[str, Cut]:
        """The rank's part of checkpoint tensors by name; tensors without entry are whole."""
        hidden = range(config.hidden_size)
        gate_up = [(config.intermediate_size, self.inner)] * 2
        rows = self._attention_rows(config)
        if config.fused_checkpoint:
            rows |= {"mlp.gate_up_proj": (gate_up, hidden)}
        else:
            rows |= {
                name: ([part], hidden) for name, part in zip(("mlp.gate_proj", "mlp.up_proj"), gate_up, strict=True)
            }
        outputs = config.num_heads * config.value_dim
        layer = {
            "self_attn.sinks": Cut((config.num_heads,), [self.heads], range(1)),
            "self_attn.o_proj.weight": Cut((len(hidden), outputs), [hidden], _times(self.heads, config.value_dim)),
            "mlp.down_proj.weight": Cut((len(hidden), config.intermediate_size), [hidden], self.inner),
        }
        if config.qk_norm == "all":
            counts = config.num_heads, config.num_kv_heads
            for name, count, heads in zip(("q_norm", "k_norm"), counts, (self.heads, self.kv_heads), strict=True):
                own = [_times(heads, config.head_dim)]
                layer[f"self_attn.{name}.weight"] = Cut((count * config.head_dim,), own, range(1))
        if (mixture := config.mixture) is not None:
            names, units = mixture.names, mixture.intermediate_size
            inner = [(units, self.expert_inner)] * (2 // len(names.gate_up))
            if mixture.alternates:
                inner = [(2 * units, _times(self.expert_inner, 2))]
            for number in range(mixture.num_experts):
                expert = f"{names.experts}.{number}"
                rows |= {f"{expert}.{name}": (inner, hidden) for name in names.gate_up}
                layer[f"{expert}.{names.down}.weight"] = Cut((len(hidden), units), [hidden], self.expert_inner)
            shared = mixture.shared_size, self.shared_inner
            rows |= {f"{SHARED_EXPERTS}.{name}": ([shared], hidden) for name in ("gate_proj", "up_proj")}
            layer[f"{SHARED_EXPERTS}.down_proj.weight"] = Cut((len(hidden), shared[0]), [hidden], shared[1])
        for name, (parts, inputs) in rows.items():
            total, stretches = _joined(parts)
            layer[f"{name}.weight"] = Cut((total, len(inputs)), stretches, inputs)
            layer[f"{name}.bias"] = Cut((total,), stretches, range(1))
        tokens = Cut((config.vocabulary_size, len(hidden)), [self.vocabulary], hidden)
        return {
            "model.embed_tokens.weight": tokens,
            "lm_head.weight": tokens,
            **{
                f"model.layers.{number}.{config.name(name)}": cut
                for number in range(len(config.layers))
                for name, cut in layer.items()
            },
        }

    def _attention_rows(self, config: DecoderConfig) -> dict[str, tuple[Sequence[tuple[int, range]], range]]:
        """Length and range of the parts of each input projection, and its inputs. Latents are whole on each rank."""
        hidden, latent = range(config.hidden_size), config.latent
        if latent is not None:
            query = [(config.num_heads * latent.query_dim, _times(self.heads, latent.query_dim))]
            of_head = latent.plain_dim + latent.value_dim
            up = [(config.num_heads * of_head, _times(self.heads, of_head))], range(latent.rank)
            if latent.query_rank is None:
                return {"self_attn.q_proj": (query, hidden), "self_attn.kv_b_proj": up}
            return {"self_attn.q_b_proj": (query, range(latent.query_rank)), "self_attn.kv_b_proj": up}
        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        qkv = [
            (count * config.head_dim, _times(heads, config.head_dim))
            for count, heads in zip(counts, (self.heads, self.kv_heads, self.kv_heads), strict=True)
        ]
        if config.fused_checkpoint:
            return {"self_attn.qkv_proj": (qkv, hidden)}
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return {name: ([part], hidden) for name, part in zip(names, qkv, strict=True)}


def part_of(config: ModelConfig, ranks: Ranks) -> tuple[int, Mapping[str, Cut]]:
    """This rank's key-value heads and cuts. Raises StartError if the model cannot be split."""
    if ranks.size == 1:
        return config.num_kv_heads, UNCUT
    if not isinstance(config, DecoderConfig):
        raise StartError(
            "--tensor-parallel-size is for the families that run natively; this model runs in transformers' own code, "
            "which keeps its layers whole"
        )
    if config.layer_needs:
        raise StartError(
            "--tensor-parallel-size is for networks without states whose layers all have heads of one size; other "
            "layers are kept whole"
        )
    shard = Shard.of(config, ranks.rank, ranks.size)
    return len(shard.kv_heads), shard.cuts(config)


def _stretch(total: int, part: int, parts: int) -> range:
    """Range number `part` of `parts` ranges of range(total), nearly equal in length."""
    return range(total * part // parts, total * (part + 1) // parts)


def _inner(units: int, rank: int, size: int) -> range:
    together = gcd(_ALIGNMENT, units) if units >= _ALIGNMENT * size else 1
    return _times(_stretch(units // together, rank, size), together)


def _times(stretch: range, factor: int) -> range:
    return range(stretch.start * factor, stretch.stop * factor)


def _joined(parts: Sequence[tuple[int, range]]) -> tuple[int, list[range]]:
    """Ranges in several tensors as ranges in their concatenation, with its length. parts: length and range in each."""
    total, stretches = 0, []
    for length, stretch in parts:
        stretches.append(range(total + stretch.start, total + stretch.stop))
        total += length
    return total, stretches
