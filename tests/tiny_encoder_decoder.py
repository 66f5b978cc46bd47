"""Networks of encoder and decoder with random weights, small enough for tests, and what transformers makes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_encoder import write_pair_tokenizer

START, END = 0, 2
"""What outputs begin with, and end with."""

TEXT: dict[str, Any] = {"vocab_size": 261, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": TEXT
    | {
        "d_model": 48,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "n_positions": 96,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "decoder_start_token_id": START,
        "feed_forward_proj": "gated-gelu",
    },
    "bart": TEXT
    | {
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 96,
        "decoder_start_token_id": START,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
    },
}


def write_encoder_decoder(directory: Path, family: str, seed: int = 0, **config: Any) -> Path:
    """A checkpoint with a tokenizer of bytes, that puts [CLS] and [SEP] around texts."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = FAMILIES[family] | config
    torch.manual_seed(seed)
    network: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **sizes))
    # Fresh weights are small and norms constant, which would hide a mistaken one, and have outputs repeat one token.
    for name, parameter in network.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.3)
    network.generation_config.forced_eos_token_id = None
    network.save_pretrained(directory)
    write_pair_tokenizer(directory, has_types=False)
    return directory


class SlowEncoderDecoder:
    """A checkpoint as transformers computes it, one input at a time."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self._network: Any = AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager").eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def token_ids(self, text: str) -> list[int]:
        """What the encoder reads of a text."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def outputs(
        self, encoder: Sequence[int], num_tokens: int, decoder: Sequence[int] = (START,), **options: Any
    ) -> Any:
        """The tokens behind the decoder's prompt, greedily or with `options` of generate, of each output asked for."""
        import torch

        found = self._network.generate(
            input_ids=torch.tensor([list(encoder)]),
            decoder_input_ids=torch.tensor([list(decoder)]),
            max_new_tokens=num_tokens,
            use_cache=False,  # whose size transformers takes from the layers of T5's encoder
            **{"do_sample": False, "num_beams": 1} | options,
        )
        return [[token for token in one.tolist()[len(decoder) :] if token != 0] for one in found]
