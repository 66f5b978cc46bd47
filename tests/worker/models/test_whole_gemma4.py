"""Published files of Gemma 4, with networks for images and sounds, compute text as transformers' whole network."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from structlog.testing import capture_logs
from tiny_networks import randomize, save_tokenizer
from worker_helpers import new_sequence

from worker_service.execution.startup.image_network import ImageNetwork
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import read_config

CPU = torch.device("cpu")
SLIDES, LOOKS_BACK = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "global_head_dim": 24, "max_position_embeddings": 128,
    "sliding_window": 8, "layer_types": [SLIDES, LOOKS_BACK] * 2, "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision", "num_kv_shared_layers": 0, "pad_token_id": 7, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
"""In the keys of published files; transformers writes others."""
_OF_PARTS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SOUNDS = {**_OF_PARTS, "subsampling_conv_channels": [8, 4], "output_proj_dims": 32}
IMAGES = {**_OF_PARTS, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 32}
GLOBAL_HEADS = {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
WHOLE: dict[str, dict[str, Any]] = {
    "embeddings for layers": {
        "model_type": "gemma4",
        "text_config": TEXT | {
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 131, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "use_bidirectional_attention": None,
        },
        "audio_config": SOUNDS,
    },
    "dense": {"model_type": "gemma4", "text_config": TEXT | GLOBAL_HEADS | {"hidden_size_per_layer_input": 0}},
    "no windows": {
        "model_type": "gemma4",
        "text_config": TEXT | GLOBAL_HEADS | {
            "hidden_size_per_layer_input": 0, "num_hidden_layers": 1, "layer_types": [LOOKS_BACK],
        },
    },
    "experts": {
        "model_type": "gemma4",
        "text_config": TEXT | GLOBAL_HEADS | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
            "moe_intermediate_size": 36,
        },
    },
    "unified": {
        "model_type": "gemma4_unified",
        "text_config": TEXT | GLOBAL_HEADS | {
            "enable_moe_block": False, "num_experts": None, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 262_144,
        },
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 48},
        "audio_config": {"audio_embed_dim": 16},
    },
}  # fmt: skip
TOKENS = {"image_token_id": PROMPT[3], "audio_token_id": PROMPT[11], "video_token_id": PROMPT[20]}


@pytest.fixture(scope="module", params=WHOLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText

    path, keys = tmp_path_factory.mktemp("gemma4"), {"vision_config": IMAGES} | WHOLE[request.param] | TOKENS
    torch.manual_seed(0)
    network = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**json.loads(json.dumps(keys))))
    randomize(network)
    for name, buffer in network.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
    network.save_pretrained(path)
    save_tokenizer(path)
    written = json.loads((path / "config.json").read_text())
    written["text_config"] = keys["text_config"] | {"model_type": written["text_config"]["model_type"]}
    (path / "config.json").write_text(json.dumps(written | {"vision_soft_tokens_per_image": 280}))
    return path


def test_text_is_that_of_the_whole_network(folder: Path) -> None:
    oracle, worker = Oracle(folder), SteppedWorker(load_runner(folder))
    assert isinstance(read_config(Checkpoint(folder).config), DecoderConfig)
    found = worker.prompt_logprobs([5, 1, 17, 13])
    torch.testing.assert_close(found, oracle.logprobs(PROMPT)[:-1], atol=1e-4, rtol=1e-4)
    worker = SteppedWorker(worker.runner)
    first = worker.step((1, len(PROMPT), True), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids
    assert [*first, *worker.generate(1, 11)] == oracle.greedy(PROMPT, 12)


def test_images_and_sounds_are_refused_by_a_sentence(folder: Path) -> None:
    with capture_logs() as logs:
        assert ImageNetwork.open(Checkpoint(folder), [folder / "config.json"], torch.float32) is None
    assert [entry["event"] for entry in logs] == ["prompts cannot contain images or sounds"]
    assert "are not read" in logs[0]["reason"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda whole: whole | {"audio_conf": 1}, "it says audio_conf = 1, which is not supported"),
        (lambda whole: whole | {"image_token_id": "a"}, "image_token_id is 'a'; it must be a whole number"),
        (lambda whole: _in_text(whole, pad_token_id=None), "text_config.pad_token_id is None; it must be a whole"),
        (lambda whole: _in_text(whole, pad_token_id=131), "text_config.pad_token_id is 131; it must be a whole"),
        (lambda whole: _in_text(whole, use_bidirectional_attention="all"), "use_bidirectional_attention is 'all'"),
        (lambda whole: _in_text(whole, num_kv_shared_layers=4), "leaves no layer of type sliding_attention"),
        (lambda whole: _in_text(whole, per_layer_config={"1": {"sliding_window": 9}}), "1.sliding_window = 9, which"),
        (lambda whole: _in_text(whole, per_layer_config={"0": {"head_dim": 9}}), "gives layers of one kind"),
        (lambda whole: _in_text(whole, model_type="gemma3_text"), "text_config describes a model gemma3_text"),
    ],
)  # fmt: skip
def test_other_keys_are_refused_by_name(changed: Callable[[dict[str, Any]], dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_config(changed({**WHOLE["dense"], **TOKENS}))


def _in_text(whole: dict[str, Any], **changes: object) -> dict[str, Any]:
    return whole | {"text_config": whole["text_config"] | changes}
