"""Heads that guess change nothing but speed, and say what they would if they computed everything anew."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_heads import SlowEagle, SlowMtp, write_head, write_mtp
from speculating import (
    ASKED,
    FORMED,
    KINDS,
    Oracle,
    Plain,
    answers_of,
    guesses_after_a_loss,
    guesses_alone_and_together,
    num_preemptions,
    speculating,
)

from worker_service.execution.drafting.draft_model import DraftModel
from worker_service.speculation.drafter import Beginning


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of EAGLE-3, for the tiny model, and of random weights."""
    folder = tmp_path_factory.mktemp("heads") / "tiny"
    return write_head(folder, hidden=64, vocabulary=259, eagle_aux_hidden_state_layer_ids=[2, 1, 0])


@dataclass
class Guessed:
    """What a head said of sequences whose next token is the likeliest, in place of which the oracle's guesses are
    verified, so that most are right."""

    oracle: Oracle
    found: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens, and what was guessed behind them."""

    def share(self, slow: SlowEagle | SlowMtp) -> float:
        """How many of its first guesses are what the slow head says. Sequences that share a block and go on differently
        behind it write to its last slot in turn, and a guess from another's slot may be another."""
        assert len(self.found) > 60
        same = [found[0] == slow.greedy(token_ids, 1)[0] for token_ids, found in self.found[::2]]
        return sum(same) / len(same)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        propose = DraftModel.propose

        def watched(model: DraftModel, beginnings: Sequence[Beginning]) -> list[list[int]]:
            guesses = []
            for one, found in zip(beginnings, propose(model, beginnings), strict=True):
                token_ids, sampling = one.sequence.token_ids[: one.num_tokens], one.sequence.sampling
                if found and not sampling.temperature and not sampling.edits_logits:
                    self.found.append((token_ids.tolist(), found))
                guesses.append(self.oracle.guess(np.array(token_ids), len(found)))
            return guesses

        patch.setattr(DraftModel, "propose", watched)


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize("num_device_blocks", [128, 40])
async def test_outputs_are_the_same_with_a_head_that_guesses_from_states(
    num_device_blocks: int, plain: Plain, head: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states and its cache go where the target's go, so it says what it would if it computed everything anew."""
    guessed = Guessed(Oracle(plain.sequences))
    guessed.watch(monkeypatch)
    config = {"method": "eagle3", "model": str(head)}
    settings = {"speculative_config": config, "num_gpu_blocks_override": num_device_blocks}
    async with speculating(tiny_model_directory, **settings) as one:
        guesses = await guesses_alone_and_together(
            one, list(zip(ASKED, plain.answers, strict=True)), len(KINDS | FORMED)
        )
        assert num_preemptions(one) > 0 or num_device_blocks > 40
    assert guesses.right.num_tokens > 2000
    slow = SlowEagle(tiny_model_directory, head)
    assert guessed.share(slow) > 0.8  # how many sequences share a last block depends on when they meet


@pytest.mark.usefixtures("all_verified")
async def test_outputs_are_the_same_with_a_head_when_a_worker_is_lost(
    plain: Plain, head: Path, tiny_model_directory: Path
) -> None:
    settings = {"speculative_config": {"method": "eagle3", "model": str(head)}}
    other = await guesses_after_a_loss(plain.without_beams, tiny_model_directory, **settings)
    assert other.verified.num_tokens > 200


@pytest.fixture(scope="module")
def mimo(byte_tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights that comes with a layer for the token after the next."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("mimo")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = Qwen2Config(
        vocab_size=259,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    torch.manual_seed(3)
    shutil.copytree(byte_tokenizer_directory, folder / "qwen2")
    Qwen2ForCausalLM(config).save_pretrained(folder / "qwen2")
    return write_mtp(folder / "mimo", folder / "qwen2")


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize("num_device_blocks", [128, 40])
async def test_outputs_are_the_same_with_the_layer_that_a_checkpoint_has_for_guesses(
    num_device_blocks: int, mimo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with speculating(mimo, speculative_config=None, num_gpu_blocks_override=128) as one:
        expected = await answers_of(one.target)
    guessed = Guessed(Oracle(expected.sequences))
    guessed.watch(monkeypatch)
    async with speculating(
        mimo, speculative_config={"method": "mtp"}, num_gpu_blocks_override=num_device_blocks
    ) as one:
        guesses = await guesses_alone_and_together(
            one, list(zip(ASKED, expected.answers, strict=True)), len(KINDS | FORMED)
        )
        assert num_preemptions(one) > 0 or num_device_blocks > 40
    assert guesses.right.num_tokens > 1000
    slow = SlowMtp(mimo.parent / "qwen2", mimo)
    assert guessed.share(slow) > 0.8  # how many sequences share a last block depends on when they meet
