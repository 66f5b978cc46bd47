"""Two ranks against one, on every native family: the same logits but for rounding, and the same tokens."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_networks import NATIVE
from rank_program import Job, run_in_ranks
from stepped_worker import DEVICE, PROMPT, Oracle
from test_lora import PeftOracle, save_adapter

from worker_service.models.layers.linear import Quantization, can_pack

# peft asks transformers for something by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

BIASED = {"attention_bias": True, "mlp_bias": True}
NETWORKS: dict[str, dict[str, Any]] = NATIVE | {
    "llama": {},
    "llama, biased": BIASED,
    "llama, tied": {"tie_word_embeddings": True},
    "llama, a key-value head each": {"num_key_value_heads": 6},
    "llama, one key-value head for both": {"num_key_value_heads": 1},
    "llama, unequal parts": {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3},
}
# Layers of different sizes are refused.
NETWORKS = {name: network for name, network in NETWORKS.items() if not name.startswith("gemma4")}
ADAPTED = [name for name in NETWORKS if "," not in name or name.startswith("llama, ")]
"""Each family, and each way to deal out heads."""
WHOLE_BF16 = {"dtype": "bfloat16"}

QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def jobs(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """In float32 with adapters: of all projections, of some, and of one whose ranks are of several sizes."""
    jobs = {name: Job(str(make_checkpoint(**network))) for name, network in NETWORKS.items()}
    for name in ADAPTED:
        network, base, folder = NETWORKS[name], Path(jobs[name].path), tmp_path_factory.mktemp("adapters")
        every: Any = "all-linear"
        some = ["qkv_proj", "down_proj"] if network.get("model_type") == "phi3" else ["k_proj", "v_proj", "down_proj"]
        if "kv_lora_rank" in network:  # kv_b_proj takes no adapters
            query = ["q_a_proj", "q_b_proj"] if network["q_lora_rank"] else ["q_proj"]
            every = [*query, "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]
            some = [query[-1], "kv_a_proj_with_mqa", "down_proj"]
        sizes = {"o_proj": 9} | ({} if name == "gpt_oss" else {"layers.1.mlp.down_proj": 2})  # experts take no adapters
        adapters = [
            save_adapter(folder / "all", base, 1, target_modules=every),
            save_adapter(folder / "some", base, 2, r=7, use_rslora=True, target_modules=some),
            save_adapter(folder / "sizes", base, 3, target_modules=every, rank_pattern=sizes),
        ]
        jobs[name] = replace(jobs[name], adapters=[str(path) for path in adapters])
    rounded = {"bfloat16": WHOLE_BF16}
    for scheme in QUANTIZATIONS:
        if can_pack(DEVICE, torch.bfloat16, scheme):
            rounded[scheme] = WHOLE_BF16 | {"quantization": scheme}
    return jobs | {name: Job(jobs["llama, biased"].path, **options) for name, options in rounded.items()}


@pytest.fixture(scope="module")
def of_ranks(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run(run_in_ranks(jobs, folder), env=environment, check=True, timeout=300)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ADAPTED)
def test_ranks_hold_parts_of_adapters_that_together_say_what_pefts_merged_models_say(
    name: str, jobs: dict[str, Job], of_ranks: list[Results]
) -> None:
    """Mixed in a step with each other and with the base, with fewer slots than adapters."""
    base = Path(jobs[name].path)
    oracles = [*(PeftOracle(base, Path(path), merged=True) for path in jobs[name].adapters), Oracle(base)]
    expected = [oracle.greedy(PROMPT, 6) for oracle in oracles]
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert of_ranks[0][name]["adapted"] == of_ranks[1][name]["adapted"] == expected


@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_compute_what_one_computes(name: str, jobs: dict[str, Job], of_ranks: list[Results]) -> None:
    alone, together = jobs[name].run(), of_ranks[0][name]
    torch.testing.assert_close(together["logprobs"], alone["logprobs"], atol=1e-4, rtol=1e-4)
    assert together["token_ids"] == alone["token_ids"]


def test_ranks_agree_to_the_bit(jobs: dict[str, Job], of_ranks: list[Results]) -> None:
    """All ranks have the same logits, so that each can sample for itself."""
    first, second = of_ranks
    for name in jobs:
        assert torch.equal(first[name]["logprobs"], second[name]["logprobs"]), name
        assert first[name]["token_ids"] == second[name]["token_ids"], name


@pytest.mark.parametrize("name", ["bfloat16", *QUANTIZATIONS])
def test_ranks_are_as_near_to_one_as_few_bits_allow(name: str, jobs: dict[str, Job], of_ranks: list[Results]) -> None:
    if name not in jobs:
        pytest.skip(f"this machine has no products of {name} weights")
    exact, alone = jobs["llama, biased"].run()["logprobs"], jobs[name].run()["logprobs"]
    off = (of_ranks[0][name]["logprobs"] - exact).abs().mean()
    assert 0 < off < 1.5 * (alone - exact).abs().mean()
