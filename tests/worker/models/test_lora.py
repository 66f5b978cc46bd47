"""Adapters against PEFT: what a sequence with an adapter says is what PEFT's own model says, whatever is beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapted_worker import ROOM, load, outputs, sequence
from native_networks import NATIVE
from safetensors.torch import load_file, save_file
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from test_architectures import BORROWED
from test_layers_with_states import FAMILIES as WITH_STATES
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker_helpers import tokens

from worker_service.errors import InvalidStepError
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.adapter import AdapterError
from worker_service.session.step import BlockTableUpdate

# peft asks transformers for something by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

Make = Callable[..., Path]


def save_adapter(path: Path, base: Path, seed: int, **config: Any) -> Path:
    """An adapter of random halves, as PEFT saves it."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


class PeftOracle(Oracle):
    """PEFT's model, whose halves are kept apart or merged into its weights."""

    def __init__(self, base: Path, adapter: Path, *, merged: bool) -> None:
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        self._model = model.merge_and_unload() if merged else model


FAMILIES = {
    name: NATIVE[name]
    for name in ("gemma", "gemma3_text", "gemma4_text, experts", "mistral", "qwen2", "qwen3", "smollm3", "phi3")
}
FAMILIES |= {"llama": {"model_type": "llama"}}
FAMILIES |= {
    name: NATIVE[name]
    for name in ("mixtral, windows", "qwen3_moe, dense layers between", "deepseek_v3, groups", "llama4_text, chunks")
}
MIXTURES = ("mixtral", "qwen3_moe")
"""Natively their experts take no adapters; PEFT's "all-linear" would change them too."""
FAMILIES |= {name: BORROWED[name] for name in ("olmo2", "granite", "gpt_neox", "qwen2_moe")}
FAMILIES |= {name: WITH_STATES[name] for name in ("lfm2", "nemotron_h, experts of latents", "qwen3_5_text")}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_sequences_of_several_adapters_say_what_pefts_models_say(
    family: dict[str, Any], make_checkpoint: Make, tmp_path: Path
) -> None:
    """In one batch with the base, at different ranks, on some of the projections."""
    base = make_checkpoint(**family)
    targets = ["query_key_value", "dense"] if family["model_type"] == "gpt_neox" else ["qkv_proj", "o_proj"]
    if family["model_type"] not in ("gpt_neox", "phi3"):
        targets = ["q_proj", "v_proj", "down_proj"]
    if family["model_type"] in ("lfm2", "qwen3_5_text"):
        targets = ["in_proj", "in_proj_qkv", "in_proj_a", "out_proj", "k_proj", "w2", "up_proj"]
    every: Any = "all-linear"
    if family["model_type"] in MIXTURES:
        every, targets = ["q_proj", "k_proj", "v_proj", "o_proj"], ["q_proj", "v_proj"]
    if family["model_type"] in ("gemma4_text", "llama4_text"):  # whose routers are linear layers
        every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if family["model_type"] == "nemotron_h":
        every = ["in_proj", "q_proj", "o_proj", "fc1_latent_proj", "fc2_latent_proj"]
        targets = ["in_proj", "k_proj", "fc1_latent_proj"]
    if family["model_type"] == "deepseek_v3":
        every = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        targets = ["q_b_proj", "kv_a_proj_with_mqa"]
    paths = [
        save_adapter(tmp_path / "all", base, 1, target_modules=every),
        save_adapter(tmp_path / "some", base, 2, r=7, use_rslora=True, target_modules=targets),
    ]
    runner = load_runner(base, room=ROOM)
    assert runner.adapters is not None
    names = [load(runner.adapters, path, tmp_path / f"of {path.name}") for path in paths]
    found = outputs(runner, ["", *names, ""], 6)
    expected = [
        Oracle(base).greedy(PROMPT, 6),
        PeftOracle(base, paths[0], merged=False).greedy(PROMPT, 6),
        PeftOracle(base, paths[1], merged=True).greedy(PROMPT, 6),
    ]
    assert found == [*expected, expected[0]]
    assert len({tuple(one) for one in expected}) == 3


@pytest.fixture
def base(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint


@pytest.fixture
def runner(base: Path) -> ModelRunner:
    return load_runner(base, room=ROOM)


@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize("merged", [False, True])
def test_log_probabilities_are_pefts_at_every_rank(
    rank: int, merged: bool, base: Path, runner: ModelRunner, tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "adapter", base, 3, r=rank)
    assert runner.adapters is not None
    name = load(runner.adapters, path, tmp_path / "copy")
    worker = SteppedWorker(runner)
    size = 131
    (report,) = worker.step(
        (1, len(PROMPT), False), new_sequences=(sequence(1, name, prompt_logprobs=size),)
    ).prompt_logprobs
    rows = []
    for start in range(0, len(report.token_ids), report.width):
        entries = slice(start + 1, start + 1 + size)
        by_id = sorted(zip(report.token_ids[entries], report.logprobs[entries], strict=True))
        rows.append([logprob for _, logprob in by_id])
    expected: Tensor = PeftOracle(base, path, merged=merged).logprobs(PROMPT)[:-1]
    torch.testing.assert_close(torch.tensor(rows), expected, atol=1e-4, rtol=1e-4)


def test_patterns_of_ranks_and_alphas_are_pefts(base: Path, runner: ModelRunner, tmp_path: Path) -> None:
    ranks = {"q_proj": 9, "layers.1.mlp.up_proj": 2}
    path = save_adapter(tmp_path / "adapter", base, 4, rank_pattern=ranks, alpha_pattern={"v_proj": 3})
    assert runner.adapters is not None
    name = load(runner.adapters, path, tmp_path / "copy")
    assert outputs(runner, [name], 6) == [PeftOracle(base, path, merged=False).greedy(PROMPT, 6)]


def test_more_adapters_than_slots_take_turns(base: Path, runner: ModelRunner, tmp_path: Path) -> None:
    """A slot that was another's holds nothing of it, whichever projections that one was for."""
    adapters = runner.adapters
    assert adapters is not None
    targets = [["q_proj", "k_proj"], ["up_proj"], "all-linear", ["v_proj", "gate_proj"]]
    paths = [
        save_adapter(tmp_path / str(number), base, number, r=2 + 3 * (number % 2), target_modules=modules)
        for number, modules in enumerate(targets)
    ]
    for path in paths:
        load(adapters, path, tmp_path / f"of {path.name}")
    expected = {path.name: PeftOracle(base, path, merged=False).greedy(PROMPT, 4) for path in paths}
    for pair in (["0", "1"], ["2", "0"], ["3", "2"], ["1", "3"], ["0", "0"], ["2", "1"]):
        assert outputs(runner, pair, 4) == [expected[name] for name in pair]


def test_what_cannot_be_computed_is_refused(base: Path, runner: ModelRunner, tmp_path: Path) -> None:
    adapters = runner.adapters
    assert adapters is not None
    for number in range(3):
        load(adapters, save_adapter(tmp_path / str(number), base, number), tmp_path / f"of {number}")
    with pytest.raises(InvalidStepError, match="the adapter x is not loaded"):
        outputs(runner, ["x"], 1)
    with pytest.raises(InvalidStepError, match="a step has 3 adapters; this worker has 2 slots"):
        outputs(runner, ["0", "1", "2"], 1)
    adapters.remove("0")
    with pytest.raises(InvalidStepError, match="the adapter 0 is not loaded"):
        outputs(runner, ["0"], 1)
    assert len(outputs(runner, ["1", "2"], 1)) == 2


def test_a_fork_has_its_parents_adapter(base: Path, runner: ModelRunner, tmp_path: Path) -> None:
    from worker_service.session.step import Fork

    assert runner.adapters is not None
    path = save_adapter(tmp_path / "adapter", base, 5)
    name = load(runner.adapters, path, tmp_path / "copy")
    worker = SteppedWorker(runner)
    (first,) = worker.step((1, len(PROMPT), True), new_sequences=(sequence(1, name),)).token_ids
    fork = Fork(1, 2, len(PROMPT), len(PROMPT) - 1, tokens([*range(9), *range(20, 30)]), 1)
    found = worker.step(
        (2, 1, True), forks=(fork,), block_table_updates=(BlockTableUpdate(1, 9, tokens(range(30, 40))),)
    )
    assert found.token_ids == [first]


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | changes))

    return spoil


def spoil_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        held = load_file(path / "adapter_model.safetensors")
        change(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path / "adapter_model.safetensors")

    return spoil


def truncate(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def pickled(path: Path) -> None:
    torch.save({}, path / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no JSON": (lambda path: (path / "adapter_config.json").write_bytes(b"{") and None, "is not JSON"),
    "another method": (spoil_config(peft_type="IA3"), "peft_type must be LORA"),
    "DoRA": (spoil_config(use_dora=True), "use_dora asks for DoRA"),
    "whole modules": (spoil_config(modules_to_save=["lm_head"]), "modules_to_save asks for whole modules"),
    "PiSSA": (spoil_config(init_lora_weights="pissa_niter_4"), "init_lora_weights is .*may change the base's weights"),
    "OLoRA": (spoil_config(init_lora_weights="olora"), "may change the base's weights"),
    "QALoRA": (spoil_config(use_qalora=True), "use_qalora asks for pooled inputs"),
    "an unknown key": (
        spoil_config(use_rotation=True),
        "'use_rotation' is True, which is not supported and may change",
    ),
    "biases": (spoil_config(bias="all"), "bias must be none"),
    "no alpha": (spoil_config(lora_alpha=None), "lora_alpha is None, not a number"),
    "infinite alpha": (spoil_config(lora_alpha=float("inf")), "lora_alpha is .*, not a number"),
    "huge alpha": (spoil_config(lora_alpha=10**400), "lora_alpha is .*, not a number"),
    "a pattern": (spoil_config(alpha_pattern={"(a+)+$": 3}), "is a pattern"),
    "too high a rank": (spoil_tensors(lambda held: held.update({FIRST: torch.zeros(65, 48)})), "has rank 65"),
    "no rank": (spoil_tensors(lambda held: held.update({FIRST: torch.zeros(0, 48)})), "has rank 0"),
    "another shape": (spoil_tensors(lambda held: held.update({FIRST: torch.zeros(4, 47)})), r"is \[4, 47\]"),
    "a scalar": (spoil_tensors(lambda held: held.update({FIRST: torch.zeros(())})), "has rank 0"),
    "one half": (spoil_tensors(lambda held: held.pop(FIRST)), "has lora_B alone"),
    "NaN": (spoil_tensors(lambda held: held[FIRST].fill_(float("nan"))), "not finite"),
    "integers": (spoil_tensors(lambda held: held.update({FIRST: torch.zeros(4, 48, dtype=torch.int64)})), "of I64"),
    "another tensor": (spoil_tensors(lambda held: held.update({"a": torch.zeros(1)})), "neither lora_A nor lora_B"),
    "an unknown layer": (
        spoil_tensors(lambda held: held.update({FIRST.replace(".0.", ".9."): torch.zeros(4, 48)})),
        "this model has no adapters for",
    ),
    "the head": (
        spoil_tensors(lambda held: held.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)})),
        "lm_head",
    ),
    "one half by two names": (
        spoil_tensors(
            lambda held: held.update({FIRST.replace(".layers", ".language_model.layers"): torch.zeros(4, 48)})
        ),
        "two tensors for one half of a projection",
    ),
    "no tensors": (spoil_tensors(lambda held: held.clear()), "has no tensors"),
    "a short file": (truncate, "not a sound safetensors file"),
    "a pickle": (pickled, "not a sound safetensors file"),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILED.values(), ids=SPOILED)
def test_what_is_wrong_with_an_adapter_is_said(
    spoil: Callable[[Path], None], sentence: str, base: Path, runner: ModelRunner, tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "adapter", base, 1)
    spoil(path)
    assert runner.adapters is not None
    with pytest.raises(AdapterError, match=sentence) as error:
        load(runner.adapters, path, tmp_path / "copy")
    assert str(tmp_path) not in str(error.value)
    assert not runner.adapters._loaded


@pytest.mark.parametrize("module", ["mlp.experts.0.up_proj", "mlp.gate"])
def test_an_adapter_of_experts_or_of_their_router_is_refused(
    module: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    base = make_checkpoint(**NATIVE["qwen3_moe, renormalised"])
    adapters = load_runner(base, room=ROOM).adapters
    assert adapters is not None
    path = save_adapter(tmp_path / "adapter", base, 1, target_modules=["q_proj"])
    spoil_tensors(lambda held: held.update({FIRST.replace("self_attn.q_proj", module): torch.zeros(4, 48)}))(path)
    with pytest.raises(AdapterError, match=rf"this model has no adapters for .*{module}"):
        load(adapters, path, tmp_path / "copy")


def test_beside_experts_dense_layers_take_adapters(make_checkpoint: Make) -> None:
    adapters = load_runner(make_checkpoint(**NATIVE["qwen3_moe, dense layers between"]), room=ROOM).adapters
    assert adapters is not None
    feed_forward = [name for name in adapters.shapes if ".mlp." in name]
    layers = (0, 2, 3, 4)
    kinds = ("gate_proj", "up_proj", "down_proj")
    assert feed_forward == [f"model.layers.{number}.mlp.{kind}" for number in layers for kind in kinds]
