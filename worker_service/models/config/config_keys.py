"""Keys of a config.json that have no effect on the network, grouped by reason. Unknown keys are refused.

A model is refused if its config.json has a key that the family's reader does not read and that is not listed here. A
key that changes the network of any family must not be listed here. If a key with an effect were listed, a family's
reader could ignore the key without an error.
"""

import re
from collections.abc import Mapping
from typing import Any

from worker_service.read_keys import ReadKeys
from worker_service.wording import named, shown

BOOKKEEPING = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled", "_from_model_config",
    "_model_name_or_path", "_name_or_path", "_sliding_window_pattern", "export_model_type", "finetuning_task",
    "is_llama_config", "model_max_length", "model_name", "name_or_path", "revision", "tokenizer_class",
    "tokenizer_model_max_length", "tokenizer_padding_side", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_training", "unsloth_version",
})  # fmt: skip
"""Keys about the origin of a config.json and the program that wrote it. The key `_sliding_window_pattern` has no
effect, because every file with this key also has `layer_types`."""

EXECUTION = frozenset({
    "attn_implementation", "cache_implementation", "chunk_size_feed_forward", "dtype", "experts_implementation",
    "fusion_config", "inference_runner", "kernel_config", "pad_key_length", "pre_allocate_kv_cache", "pretraining_tp",
    "reference_compile", "repad_logits_with_grad", "return_dict", "tf_legacy_loss", "torch_dtype", "torchscript",
    "transformers_weights", "use_bfloat16", "use_cache", "use_parallel_embedding", "validate_runner_input",
})  # fmt: skip
"""Settings of other programs that compute or store the network. The key `dtype` has no effect on the network; the flag
`--dtype auto` reads it in another place."""

CODE = frozenset({"auto_map", "custom_generate", "custom_pipelines", "trust_remote_code"})
"""Keys that refer to code in the model's folder. The service never runs this code; the key `model_type` determines the
network."""

TRAINING = frozenset({
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "aux_loss_alpha", "classif_dropout",
    "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
    "initializer_factor", "initializer_range", "layerdrop", "output_router_logits", "replacing_rate", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "save_step",
})  # fmt: skip
"""Settings that have an effect only in training."""

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
"""Settings of text generation, which have no effect on the network's outputs. The scheduler controls generation."""

LABELS = frozenset({
    "_num_labels", "id2label", "label2id", "num_labels", "problem_type", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
})  # fmt: skip
"""Settings of a classification head. The key `architectures` shows whether a network has such a head. If the head is
not supported, the model is refused because of the head's unused tensors."""

HARMLESS = BOOKKEEPING | EXECUTION | CODE | TRAINING | GENERATION | LABELS

_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False, "attention_bias": False, "bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
    "is_decoder": False, "is_encoder_decoder": False, "lm_head_bias": False, "mlp_bias": False,
    "partial_rotary_factor": 1, "position_embedding_type": "absolute", "qkv_bias": False, "rope_interleaved": False,
    "shared_expert_intermediate_size": 0, "tie_encoder_decoder": False, "use_bidirectional_attention": False,
    "use_mrope": False,
}  # fmt: skip
"""Keys that may have only the given value, unless the family's reader reads the key. With any other value, config.json
would describe another network."""

_MAX_SHOWN = 8
_GENERATES = re.compile("(forcausallm|lmheadmodel|model)$")
"""Ends of the class names of networks that generate text, in lower case. The class name of a network without an output
head ends with "model"."""


def check_all_read(keys: ReadKeys, family: object) -> None:
    """Raise ValueError if a key of config.json has not been read and is not in HARMLESS."""
    keys.neutral(**_NEUTRAL)
    refuse({name: value for name, value in keys.unread().items() if name not in HARMLESS}, family)


def refuse(keys: Mapping[str, Any], family: object) -> None:
    """Raise a ValueError that names the given keys. If `keys` is empty, this function does nothing."""
    if keys:
        said = ", ".join(f"{named(name)} = {shown(value)}" for name, value in [*keys.items()][:_MAX_SHOWN])
        more = f" and {len(keys) - _MAX_SHOWN} more" if len(keys) > _MAX_SHOWN else ""
        raise ValueError(
            f"it says {said}{more}, which is not supported in a model {family} and may change what the network "
            "computes; remove what you know to change nothing"
        )


def check_generates(json: Mapping[str, Any], *own: str) -> None:
    """Raise ValueError if the key `architectures` names a network of another family, or an output head that does not
    compute next-token logits.

    own: class names of this family that cannot be derived from the family's name.
    """
    family = str(json.get("model_type"))
    families = {name.replace("_", "").lower() for name in (family, family.removesuffix("_text"))}
    for name in architectures(json):
        if name not in own and _GENERATES.sub("", name.replace("_", "").lower()) not in families:
            raise ValueError(
                f"architectures names {named(name)}, which is not the network of a model {family} that continues text; "
                "networks of other families, and classifiers, reward models and other heads, are not supported"
            )


def architectures(json: Mapping[str, Any]) -> list[str]:
    """The names of the network's classes in a config.json. Raises ValueError if the key `architectures` is not a list
    of names."""
    names = json.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("architectures is not a list of names")
    return names
