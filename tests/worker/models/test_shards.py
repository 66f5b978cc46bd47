"""The parts of a network that ranks hold: what each has a place for, and that together they are the network."""

from typing import Any

import pytest
import torch

from pagewire_common.start_error import StartError
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.loading.adapter import Adapter
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import read_decoder
from worker_service.models.decoders.shard import Shard
from worker_service.parallel.cut import Cut
from worker_service.parallel.ranks import Ranks

META = torch.device("meta")


def config(**changes: Any) -> DecoderConfig:
    sizes = {
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 10,
        "max_position_embeddings": 128,
    }
    json = sizes | changes
    return read_decoder(json)


LATENTS = {"head_dim": 6, "qk_rope_head_dim": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "v_head_dim": 8,
           "num_key_value_heads": None, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 2,
           "moe_intermediate_size": 40}  # fmt: skip


CONFIGS: dict[str, tuple[DecoderConfig, int]] = {
    "two": (config(attention_bias=True, mlp_bias=True), 2),
    "tied": (config(tie_word_embeddings=True), 4),
    "unequal parts": (config(num_attention_heads=9, num_key_value_heads=3), 2),
    "shared key-value heads": (config(num_attention_heads=12, num_key_value_heads=2), 4),
    "shared unequally": (config(num_attention_heads=5, num_key_value_heads=1), 3),
    "fused": (config(model_type="phi3", hidden_size=60), 3),
    "normed": (config(model_type="gemma3_text"), 4),
    "experts": (config(model_type="qwen3_moe", num_experts=3, num_experts_per_tok=1, moe_intermediate_size=40), 4),
    "experts with biases": (config(model_type="gpt_oss", num_experts=3, num_experts_per_tok=1), 2),
    "experts between": (config(model_type="qwen3_moe", num_experts=2, num_experts_per_tok=1, decoder_sparse_step=2), 2),
    "normed over all heads": (config(model_type="olmo3", num_attention_heads=9, num_key_value_heads=3), 2),
    "experts in stacks": (
        config(model_type="llama4_text", num_local_experts=3, intermediate_size_mlp=90, interleave_moe_layer_step=2),
        2,
    ),
    "experts without dense layers": (config(model_type="minimax_m2", num_local_experts=3, num_experts_per_tok=1), 8),
    "latents": (config(**LATENTS, model_type="deepseek_v3", q_lora_rank=14, attention_bias=True), 4),
    "latents, unequal": (config(**LATENTS, model_type="deepseek_v2", q_lora_rank=None, num_attention_heads=5), 3),
    "more ranks than tokens": (config(vocab_size=5, num_attention_heads=8, num_key_value_heads=8), 8),
}


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest) -> tuple[DecoderConfig, int]:
    return CONFIGS[request.param]


def shards(network: DecoderConfig, size: int) -> list[Shard]:
    return [Shard.of(network, rank, size) for rank in range(size)]


def test_every_place_has_the_shape_of_its_part(case: tuple[DecoderConfig, int]) -> None:
    network, size = case
    whole = Decoder(network, torch.float32, META).checkpoint_tensors()
    for rank in range(size):
        cuts = Shard.of(network, rank, size).cuts(network)
        places = Decoder(network, torch.float32, META, Ranks(rank, size)).checkpoint_tensors()
        assert list(places) == list(whole)
        for name, place in places.items():
            cut = cuts.get(name)
            assert (place.shape if cut is None else cut.shape) == whole[name].shape, name
            assert cut is None or place.shape == cut.of(whole[name]).shape, name


def test_the_parts_are_the_whole(case: tuple[DecoderConfig, int]) -> None:
    """Several ranks may hold the same key and value heads; every other part has one rank."""
    network, size = case
    held = {
        name: torch.zeros(cut.shape, dtype=torch.int64) for name, cut in shards(network, size)[0].cuts(network).items()
    }
    for shard in shards(network, size):
        for name, cut in shard.cuts(network).items():
            for stretch in cut.rows:
                rows = held[name][stretch.start : stretch.stop]
                (rows if rows.dim() == 1 else rows[:, cut.columns.start : cut.columns.stop]).add_(1)
    for name, times in held.items():
        assert (times >= 1).all(), name
        shared = ("k_proj", "k_norm", "v_proj", "qkv_proj") if size > network.num_kv_heads else ()
        assert any(part in name for part in shared) or (times == 1).all(), name


def test_query_heads_are_with_their_key_value_heads_and_shared_out_evenly(case: tuple[DecoderConfig, int]) -> None:
    network, size = case
    group = network.num_heads // network.num_kv_heads
    parts = shards(network, size)
    for shard in parts:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        # Each of its key-value heads serves as many of its query heads, as attention takes for granted.
        assert len(shard.heads) % len(shard.kv_heads) == 0
    assert [head for shard in parts for head in shard.heads] == list(range(network.num_heads))
    inner = [len(shard.inner) for shard in parts]
    assert max(inner) - min(inner) <= 4  # 100 is 25 times 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "sentence"),
    [
        (9, 3, 4, r"is 4, and 9 heads that share 3 key-value heads .* up to 3, or a multiple of 3 up to 9"),
        (4, 2, 8, r"is 8, and 4 heads that share 2 key-value heads"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_the_numbers(
    heads: int, kv_heads: int, size: int, sentence: str
) -> None:
    with pytest.raises(StartError, match=sentence):
        Shard.of(config(num_attention_heads=heads, num_key_value_heads=kv_heads), 0, size)


def test_random_weights_of_ranks_are_parts_of_those_of_one(case: tuple[DecoderConfig, int]) -> None:
    network, size = case
    cpu = torch.device("cpu")
    whole = Decoder(network, torch.float32, cpu).checkpoint_tensors()
    DummyWeights(torch.device("cpu")).load_into(whole)
    for rank in range(size):
        cuts = Shard.of(network, rank, size).cuts(network)
        places = Decoder(network, torch.float32, cpu, Ranks(rank, size)).checkpoint_tensors()
        DummyWeights(torch.device("cpu")).load_into(places, cuts)
        for name, place in places.items():
            assert torch.equal(place, cuts[name].of(whole[name]) if name in cuts else whole[name]), name


def test_ranks_parts_of_an_adapter_are_parts_of_what_it_adds(case: tuple[DecoderConfig, int]) -> None:
    """And fit the places that each has for it; the shapes of a checkpoint's are the whole network's in every rank."""
    network, size = case
    room = AdapterRoom(num_slots=1, max_rank=3, max_loaded=1)
    shapes = Adapters(Decoder(network, torch.float32, META), room).shapes
    whole = Adapter(
        {
            name: (torch.randint(-9, 9, (3, inputs)).float(), torch.randint(-9, 9, (outputs, 3)).float())
            for name, (outputs, inputs) in shapes.items()
        }
    )
    for rank in range(size):
        cuts = Shard.of(network, rank, size).cuts(network)
        of_rank = Adapters(Decoder(network, torch.float32, torch.device("cpu"), Ranks(rank, size)), room, cuts)
        assert of_rank.shapes == shapes
        part = whole.part(cuts)
        for name, (a, b) in part.halves.items():
            added = torch.mm(*reversed(whole.halves[name]))
            cut = cuts.get(f"{name}.weight")
            assert torch.equal(b @ a, added if cut is None else cut.of(added)), name
        of_rank.add("it", part)
        of_rank._fill(0, part)


def test_an_adapters_pieces_are_the_adapter() -> None:
    whole = Adapter({str(number): (torch.ones(1, size), torch.ones(2, 1)) for number, size in enumerate((6, 2, 2, 30))})
    pieces = list(whole.pieces(40))
    assert [list(piece.halves) for piece in pieces] == [["0"], ["1", "2"], ["3"]]
    assert {name: half for piece in pieces for name, half in piece.halves.items()} == whole.halves


def test_a_part_is_of_some_rows_and_some_of_their_columns() -> None:
    matrix = torch.arange(12).view(4, 3)
    assert Cut((4, 3), [range(3, 4), range(1)], range(1, 3)).of(matrix).tolist() == [[10, 11], [1, 2]]
