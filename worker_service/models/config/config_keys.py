"""Keys of a config.json without effect, grouped by reason. A model with any other unread key is refused. No key that
changes any family's network may be listed: that family's reader could then ignore the key."""

import re
from collections.abc import Mapping
from typing import Any

from worker_service.read_keys import ReadKeys
from worker_service.wording import named, shown

BOOKKEEPING = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled", "_from_model_config",
    "_model_name_or_path", "_name_or_path", "_sliding_window_pattern", "export_model_type", "finetuning_task",
    "internal_version", "is_composition", "is_llama_config", "model_max_length", "model_name", "name_or_path",
    "revision", "tokenizer_class",
    "tokenizer_model_max_length", "tokenizer_name", "tokenizer_padding_side", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_training", "unsloth_version", "verbose",
})  # fmt: skip
"""Origin of the file, and the program that wrote it. Files with `_sliding_window_pattern` also have `layer_types`."""

EXECUTION = frozenset({
    "attn_implementation", "cache_implementation", "chunk_size_feed_forward", "dtype", "ep_size",
    "experts_implementation",
    "from_tf", "fusion_config", "inference_runner", "kernel_config", "pad_key_length", "pre_allocate_kv_cache",
    "pretraining_tp", "reference_compile", "repad_logits_with_grad", "return_dict", "tf_legacy_loss", "torch_dtype",
    "torchscript", "transformers_weights", "use_bfloat16", "use_cache", "use_parallel_embedding",
    "use_reentrant_checkpoints", "validate_runner_input",
})  # fmt: skip
"""Settings of other programs that compute or store the network. `--dtype auto` reads `dtype` elsewhere."""

CODE = frozenset({"auto_map", "custom_generate", "custom_pipeline", "custom_pipelines", "trust_remote_code"})
"""Code in the model's folder, which is never run; `model_type` determines the network."""

TRAINING = frozenset({
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "aux_loss_alpha",
    "classif_dropout", "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "hidden_dropout",
    "hidden_dropout_prob", "ignore_index", "init_config", "initializer_factor", "initializer_range",
    "layerdrop", "output_router_logits", "replacing_rate", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "save_step", "seq_aux",
})  # fmt: skip
"""Settings for training only."""

GENERATION = frozenset({
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_bos_token_to_be_generated", "forced_bos_token_id", "forced_decoder_ids",
    "forced_eos_token_id", "length_penalty", "mask_token_id", "max_length", "min_length", "no_repeat_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "target_lookbehind", "task_specific_params", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
})  # fmt: skip
"""Settings of generation, which the scheduler controls."""

LABELS = frozenset({
    "_num_labels", "id2label", "label2id", "num_labels", "problem_type", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
})  # fmt: skip
"""Settings of a classification head. An unsupported head is refused because of its unused tensors."""

HARMLESS = BOOKKEEPING | EXECUTION | CODE | TRAINING | GENERATION | LABELS

_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False, "attention_bias": False, "bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
    "is_decoder": False, "is_encoder_decoder": False, "lm_head_bias": False, "mlp_bias": False,
    "partial_rotary_factor": 1, "position_embedding_type": "absolute", "qkv_bias": False, "rope_interleaved": False,
    "shared_expert_intermediate_size": 0, "tie_encoder_decoder": False, "use_bidirectional_attention": False,
    "use_mrope": False,
}  # fmt: skip
"""Keys with the only value allowed, unless the family's reader reads the key."""

_MAX_SHOWN = 8
_GENERATES = re.compile("(forcausallm|lmheadmodel|model)$")
"""Ends of class names of networks that generate text, in lower case; without an output head: "model"."""


def check_all_read(keys: ReadKeys, family: object) -> None:
    """Raise ValueError if an unread key is not in HARMLESS."""
    keys.neutral(**_NEUTRAL)
    refuse({name: value for name, value in keys.unread().items() if name not in HARMLESS}, family)


def refuse(keys: Mapping[str, Any], family: object) -> None:
    """Raise a ValueError with the given keys, if any."""
    if keys:
        said = ", ".join(f"{named(name)} = {shown(value)}" for name, value in [*keys.items()][:_MAX_SHOWN])
        more = f" and {len(keys) - _MAX_SHOWN} more" if len(keys) > _MAX_SHOWN else ""
        raise ValueError(
            f"it says {said}{more}, which is not supported in a model {family} and may change what the network "
            "computes; remove keys that you know to change nothing"
        )


def check_generates(json: Mapping[str, Any], *own: str) -> None:
    """Raise ValueError if `architectures` names another family's network, or a head without next-token logits. own:
    class names that cannot be derived from the family's name."""
    family = str(json.get("model_type"))
    families = {name.replace("_", "").lower() for name in (family, family.removesuffix("_text"))}
    for name in architectures(json):
        if name not in own and _GENERATES.sub("", name.replace("_", "").lower()) not in families:
            raise ValueError(
                f"architectures names {named(name)}, which is not the network of a model {family} that continues text; "
                "networks of other families, and classifiers, reward models and other heads, are not supported"
            )


def architectures(json: Mapping[str, Any]) -> list[str]:
    """Names of the network's classes. Raises ValueError."""
    names = json.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("architectures is not a list of names")
    return names
