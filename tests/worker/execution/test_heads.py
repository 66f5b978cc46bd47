"""A head guesses what a slow one guesses, wherever its blocks have been, or is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_heads import SlowEagle, SlowMtp, write_head, write_mtp
from worker_helpers import state, tokens

from pagewire_common.start_error import StartError
from worker_service.execution.drafting.draft_model import DraftModel
from worker_service.execution.sampling.sampler import sample
from worker_service.execution.worker import load_worker
from worker_service.models.decoders.eagle import EagleHead
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import BlockMapping, SchedulerOutput
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Beginning

BLOCK_SIZE = 4
TEXT = [(11 * number * number + 5) % 131 for number in range(40)]
HEADS: dict[str, dict[str, Any]] = {
    "its authors' form": {},
    "speculators' form": {
        "layer_name": "layers.0",
        "draft_vocab_size": None,
        "target_hidden_size": None,
        "norm_before_residual": None,
        "eagle_aux_hidden_state_layer_ids": None,
    },
    "few tokens": {"num_guessable": 50},
    "an embedding of its own": {"own_embedding": True, "layer_name": "layers.0", "num_guessable": 40},
    "a normalised residual": {"norm_before_residual": True},
    "biases": {"bias": True},
    "normalised heads": {"family": "qwen3"},
    "other states": {"eagle_aux_hidden_state_layer_ids": [1, 3, 2]},
    "states behind layers": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 2]}},
    "states beside a part of its own": {
        "eagle_config": {"use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [1, 0, 3],
    },
}


def config_of(head: Path | None) -> str:
    """head: None for the one of the target's own checkpoint."""
    return json.dumps({"method": "eagle3", "model": str(head)} if head else {"method": "mtp"})


class Drafting:
    """A target and its head, stepped by hand."""

    def __init__(self, target: Path, head: Path | None, cache: Path) -> None:
        """head: None for the one of the target's own checkpoint."""
        settings = WorkerSettings(
            model=str(target), device="cpu", cache=cache, num_gpu_blocks_override=64, block_size=BLOCK_SIZE,
            swap_space=0.01, speculative_config=config_of(head), forms=False,
        )  # fmt: skip
        worker = load_worker(settings)
        assert worker.drafter is not None
        proposer = worker.drafter._proposer
        assert isinstance(proposer, DraftModel)
        self.proposer, self.runner = proposer, worker.runner
        for pool in (proposer._runner.cache_engine.device_blocks, proposer._runner.cache_engine.host_blocks):
            pool.fill_(torch.nan)  # what was never stored

    def compute(self, *chunks: tuple[SequenceState, int], **moves: BlockMapping) -> None:
        """One step of so many tokens more of each sequence."""
        output = SchedulerOutput(1, 1, **moves)  # type: ignore[arg-type]
        scheduled = [
            ScheduledChunk(one, one.num_computed_tokens, one.num_computed_tokens + count, samples=True)
            for one, count in chunks
        ]
        self.proposer.step_begins(output, scheduled)
        self.runner.execute(output, scheduled)
        for chunk in scheduled:
            chunk.sequence.num_computed_tokens = chunk.stop

    def guess(self, *asked: tuple[SequenceState, int]) -> list[list[int]]:
        """So many tokens behind those that are known of each sequence: one more than are computed."""
        return self.proposer.propose([Beginning(one, one.num_computed_tokens + 1, number) for one, number in asked])


def sequence(token_ids: Sequence[int], blocks: Sequence[int], sequence_id: int = 1, **sampling: Any) -> SequenceState:
    """Nothing of it is computed."""
    one = state(token_ids, sequence_id=sequence_id, **{"temperature": 0.0} | sampling)
    one.num_computed_tokens, one.block_ids = 0, tokens(blocks)
    return one


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def head(heads: Path) -> Path:
    return write_head(heads / "plain", num_guessable=100)


@pytest.fixture(scope="module")
def slow(tiny_checkpoint: Path, head: Path) -> SlowEagle:
    return SlowEagle(tiny_checkpoint, head)


@pytest.fixture
def one(tiny_checkpoint: Path, head: Path, tmp_path: Path) -> Drafting:
    return Drafting(tiny_checkpoint, head, tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_it_guesses_what_the_slow_head_guesses(kind: str, tiny_checkpoint: Path, heads: Path, tmp_path: Path) -> None:
    folder = write_head(heads / kind, **HEADS[kind])
    guessing, slow = Drafting(tiny_checkpoint, folder, tmp_path), SlowEagle(tiny_checkpoint, folder)
    text = sequence(TEXT, range(20, 31))
    for count in (9, 1, 14):
        guessing.compute((text, count))
        assert guessing.guess((text, 5)) == [slow.greedy(TEXT[: text.num_computed_tokens + 1], 5)]


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3", "smollm3"])
def test_it_reads_the_states_of_every_family_that_runs_natively(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """But not beyond a window, which is longer than any of these sequences."""
    wide = {"sliding_window": 4096} if family not in ("gemma", "qwen2", "qwen3", "smollm3") else {}
    target = make_checkpoint(family, **wide)
    folder = write_head(tmp_path / "head")
    guessing, slow = Drafting(target, folder, tmp_path), SlowEagle(target, folder)
    text = sequence(TEXT, range(20, 31))
    guessing.compute((text, 21))
    assert guessing.guess((text, 4)) == [slow.greedy(TEXT[:22], 4)]


def test_the_layer_of_a_checkpoint_guesses_what_the_slow_one_guesses(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    qwen2 = make_checkpoint("qwen2")
    mimo = write_mtp(tmp_path / "mimo", qwen2)
    guessing, slow = Drafting(mimo, None, tmp_path), SlowMtp(qwen2, mimo)
    text = sequence(TEXT, range(20, 31))
    for count in (1, 9, 1, 14):
        guessing.compute((text, count))
        assert guessing.guess((text, 5)) == [slow.greedy(TEXT[: text.num_computed_tokens + 1], 5)]


def test_it_draws_with_the_targets_noise(one: Drafting, slow: SlowEagle) -> None:
    text = sequence(TEXT, range(11), temperature=0.9, seed=3, top_k=20, presence_penalty=0.5)
    one.compute((text, 30))
    guessed: list[int] = []
    for _ in range(4):
        chooser = sequence([*TEXT[:31], *guessed], (), temperature=0.9, seed=3, top_k=20, presence_penalty=0.5)
        chooser.num_prompt_tokens = text.num_prompt_tokens
        guessed += sample(slow.logits(TEXT[:31], guessed)[None], [chooser]).tolist()
    assert one.guess((text, 4)) == [guessed]


def test_states_that_the_target_has_computed_since_are_read(one: Drafting, slow: SlowEagle) -> None:
    """As where a step is launched before the answer to the one before it is read."""
    text = sequence(TEXT, range(11))
    one.compute((text, 20))
    one.compute((text, 1))
    known = Beginning(text, 21, 1)
    assert one.proposer.propose([known]) == [slow.greedy(TEXT[:21], 1)]
    assert one.guess((text, 3)) == [slow.greedy(TEXT[:22], 3)]


def test_sequences_are_guessed_together_as_alone(one: Drafting, slow: SlowEagle) -> None:
    texts = [TEXT, TEXT[5:], TEXT[::-1]]
    sequences = [sequence(text, range(12 * n, 12 * n + 12), sequence_id=n) for n, text in enumerate(texts)]
    one.compute((sequences[0], 17), (sequences[1], 4), (sequences[2], 1))
    asked = [(sequences[0], 3), (sequences[1], 5), (sequences[2], 2)]
    wanted = [
        slow.greedy(text[: each.num_computed_tokens + 1], n) for text, (each, n) in zip(texts, asked, strict=True)
    ]
    assert one.guess(*asked) == wanted


def test_blocks_take_what_it_knows_along(one: Drafting, slow: SlowEagle) -> None:
    """Out, back into other blocks, and into a copy."""
    text = sequence(TEXT, range(6))
    one.compute((text, 18))
    one.guess((text, 1))
    one.compute(blocks_to_swap_out=BlockMapping((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))
    other = sequence(TEXT[::-1], range(8), sequence_id=2)  # takes the blocks that it had
    one.compute((other, 30))
    one.guess((other, 1))
    text.block_ids = tokens(range(40, 46))
    one.compute((text, 1), blocks_to_swap_in=BlockMapping((0, 1, 2, 3, 4), (40, 41, 42, 43, 44)))
    assert one.guess((text, 4)) == [slow.greedy(TEXT[:20], 4)]
    forked = sequence([*TEXT[:19], *TEXT[30:]], [40, 41, 42, 43, 50, 51], sequence_id=3)
    forked.num_computed_tokens = 18
    one.compute((forked, 2), blocks_to_copy=BlockMapping((44,), (50,)))
    assert one.guess((forked, 3)) == [slow.greedy(forked.token_ids[:21].tolist(), 3)]


def test_a_prefix_that_is_found_goes_on_with_its_finders_token(one: Drafting, slow: SlowEagle) -> None:
    """The last slot of what they share depends on the token behind it, and is computed for each."""
    first = sequence(TEXT, range(11))
    one.compute((first, 16))
    one.guess((first, 3))
    second = sequence([*TEXT[:12], *TEXT[20:]], [0, 1, 2, 30, 31, 32], sequence_id=2)
    second.num_computed_tokens = 12
    one.compute((second, 3))
    assert one.guess((second, 3)) == [slow.greedy(second.token_ids[:16].tolist(), 3)]


def test_a_prompt_that_is_computed_in_chunks_is_caught_up_with(one: Drafting, slow: SlowEagle) -> None:
    text, other = sequence(TEXT, range(11)), sequence(TEXT[::-1], range(20, 31), sequence_id=2)
    one.compute((other, 5))
    for count in (1, 7):
        one.compute((text, count))
        one.proposer.propose([Beginning(text, text.num_computed_tokens, 0), Beginning(other, 6, 1)])
    one.compute((text, 20))
    assert one.guess((text, 3)) == [slow.greedy(TEXT[:29], 3)]


def refuse(target: Path, head: Path | None, tmp_path: Path, sentence: str) -> str:
    """Returns the whole of it."""
    settings = {"model": str(target), "device": "cpu", "cache": tmp_path, "num_gpu_blocks_override": 8, "forms": False}
    with pytest.raises(StartError, match=sentence) as caught:
        load_worker(WorkerSettings(**settings, speculative_config=config_of(head)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"vocab_size": 130}, "vocab_size is 130, and the model has 131 tokens"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; EAGLE-3's heads have one layer"),
        ({"draft_vocab_size": 132}, "draft_vocab_size is 132; it must be a whole number from 1 to 131"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1"),
        ({"draft_vocab_size": True}, "draft_vocab_size is True"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ({"norm_before_residual": "false"}, "norm_before_residual is 'false'; it must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a number from"),
        ({"rope_theta": -1}, "rope_theta is -1; it must be a number from"),
        ({"partial_rotary_factor": 0.5}, "it says partial_rotary_factor = 0.5, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "mrope_section": [1]}},
            "it says rope_parameters.mrope",
        ),
        ({"fc_norm": True}, "it says fc_norm = True, which is not supported in a model of EAGLE-3's heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, "heads that are stored quantised are not read"),
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "hidden_size": 1024},
            "needs 256 cache layers, more than 16",
        ),
        ({"speculators_model_type": "mlp"}, "speculators_model_type is 'mlp'; it must be eagle3"),
        ({"speculators_model_type": "a\nb" * 10**6}, r"speculators_model_type is 'a\\nba"),
        ({"norm_before_fc": True}, "norm_before_fc are not supported"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; it must be llama or qwen2 or qwen3"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, and the model's states have 48 numbers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"hidden_size": 64}, "it has no embed_tokens, and the embeddings of .* have 48 numbers where it needs 64"),
        ({"hidden_size": None}, "config.json: hidden_size is None; it must be"),
        ({"intermediate_size": 44}, "tensor midlayer.mlp.gate_proj.weight is"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            r"layer_ids is \[1, 2\]; it must be a list of 3 whole numbers from 0",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"layer_ids is \[1, 2, 4\]; it must"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "config.json: eagle_aux_hidden_state_layer_ids is 'all'"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "config.json: eagle_aux_hidden_state_layer_ids is 3"),
        ({"transformer_layer_config": "none"}, "config.json: transformer_layer_config is 'none'; it must be"),
        (
            {"transformer_layer_config": {"hidden_size": 2**40, "num_attention_heads": 2, "num_hidden_layers": 1}},
            "transformer_layer_config.hidden_size is 1099511627776",
        ),
        ({"rope_parameters": {"rope_type": "odd"}}, "config.json: rope_parameters.rope_type is 'odd'"),
    ],
)
def test_a_head_of_another_model_or_kind_is_refused(
    config: dict[str, Any], sentence: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", **config)
    message = refuse(tiny_checkpoint, head, tmp_path, sentence)
    assert message.isprintable()
    assert len(message) < 600


def test_heads_whose_tensors_make_none_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", num_guessable=20)
    weights = load_file(head / "model.safetensors")
    for number, (changes, sentence) in enumerate(
        (
            ({"d2t": torch.full((20,), 131)}, "d2t leads beyond the 131 tokens"),
            ({"d2t": -torch.arange(20)}, "d2t has several logits for a token"),
            ({"d2t": torch.zeros(19, dtype=torch.int64)}, "d2t must have 20 whole numbers of 64 bits"),
            ({"d2t": torch.zeros(20, 1, dtype=torch.int64)}, "d2t must have 20 whole numbers of 64 bits"),
            ({"d2t": torch.zeros(20)}, "d2t must have 20 whole numbers of 64 bits"),
            ({"d2t": None}, "draft_vocab_size is 20, and d2t is missing"),
            ({"fc.weight": torch.zeros(48, 48)}, "tensor fc.weight is"),
            ({"midlayer.self_attn.q_proj.weight": torch.zeros(48, 48)}, "tensor midlayer.self_attn.q_proj.weight is"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text((head / "config.json").read_text())
        changed = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
        save_file(changed, folder / "model.safetensors")
        refuse(tiny_checkpoint, folder, tmp_path, sentence)
    (tmp_path / "0" / "model.safetensors").unlink()
    (tmp_path / "0" / "pytorch_model.bin").write_bytes(b"")
    refuse(tiny_checkpoint, tmp_path / "0", tmp_path, "the weights must be safetensors")


def test_a_tensor_of_another_form_s_layer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", layer_name="layers.0")
    weights = load_file(head / "model.safetensors")
    save_file(weights | {"midlayer.hidden_norm.weight": torch.zeros(48)}, head / "model.safetensors")
    refuse(tiny_checkpoint, head, tmp_path, "the network of config.json does not use: midlayer.hidden_norm.weight")


def test_a_head_that_cannot_be_computed_ends_the_start(
    tiny_checkpoint: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a rotation of another size")

    monkeypatch.setattr(EagleHead, "forward", fail)
    refuse(tiny_checkpoint, head, tmp_path, "the head that drafts cannot be computed: a rotation of another size")


def test_it_is_refused_where_it_cannot_guess(make_checkpoint: Callable[..., Path], head: Path, tmp_path: Path) -> None:
    refuse(make_checkpoint("mistral", sliding_window=20), head, tmp_path, '"eagle3": blocks behind')
    refuse(make_checkpoint("stablelm"), head, tmp_path, "is for the families that run natively")


def test_checkpoints_without_a_layer_of_their_own_are_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    qwen2 = make_checkpoint("qwen2")
    refuse(qwen2, None, tmp_path, "has no layer for multi-token prediction")
    mimo = write_mtp(tmp_path / "mimo", qwen2)
    weights = load_file(mimo / "model.safetensors")
    del weights["model.mtp_layers.0.input_proj.weight"]
    save_file(weights, mimo / "model.safetensors")
    refuse(mimo, None, tmp_path, "the weights lack the tensor model.mtp_layers.0.input_proj.weight")


def test_a_random_head_is_drawn_where_weights_are(tiny_checkpoint: Path, head: Path, tmp_path: Path) -> None:
    (head / "model.safetensors").rename(head / "elsewhere")
    try:
        settings = {"model": str(tiny_checkpoint), "device": "cpu", "cache": tmp_path, "num_gpu_blocks_override": 8}
        worker = load_worker(
            WorkerSettings(**settings, load_format="dummy", speculative_config=config_of(head), forms=False)
        )
        assert worker.drafter is not None
    finally:
        (head / "elsewhere").rename(head / "model.safetensors")
