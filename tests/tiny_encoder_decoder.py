"""Small encoder-decoder networks with random weights, and their results in transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_encoder import write_pair_tokenizer

START, END = 0, 2
"""First and last token of outputs."""

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

SPEECH_TOKENS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPEECH_END, SPEECH_START, ENGLISH, GERMAN, TRANSLATE, WRITE, PREVIOUS, NO_SPEECH, SILENT = range(256, 265)
FIRST_TIME = SILENT + 1
SPEECH: dict[str, Any] = {
    "vocab_size": FIRST_TIME + 1501,
    "num_mel_bins": 80,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 1500,
    "max_target_positions": 64,
    "pad_token_id": SPEECH_END,
    "bos_token_id": SPEECH_END,
    "eos_token_id": SPEECH_END,
    "decoder_start_token_id": SPEECH_START,
}
ALIGNMENT_HEADS = [[1, 2], [0, 1], [1, 0]]
GENERATION: dict[str, Any] = {
    "alignment_heads": ALIGNMENT_HEADS,
    "decoder_start_token_id": SPEECH_START,
    "eos_token_id": SPEECH_END,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": WRITE, "translate": TRANSLATE},
    "no_timestamps_token_id": SILENT,
    "max_initial_timestamp_index": 50,
    "suppress_tokens": [1, 2, SPEECH_START, ENGLISH, GERMAN, TRANSLATE, WRITE, PREVIOUS, NO_SPEECH],
    "begin_suppress_tokens": [32, SPEECH_END],
}


def write_whisper(directory: Path, seed: int = 1) -> Path:
    """A random model with audio input and a byte tokenizer."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    network: Any = WhisperForConditionalGeneration(WhisperConfig(**SPEECH))
    for name, parameter in network.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.3)
    network.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPEECH_TOKENS, "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPEECH_TOKENS[0]).save_pretrained(directory)
    return directory


def write_encoder_decoder(directory: Path, family: str, seed: int = 0, **config: Any) -> Path:
    """A checkpoint with a byte tokenizer, which puts [CLS] and [SEP] around texts."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = FAMILIES[family] | config
    torch.manual_seed(seed)
    network: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **sizes))
    # Fresh weights are small and norms constant, which would hide errors and make outputs repeat one token.
    for name, parameter in network.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.3)
    network.generation_config.forced_eos_token_id = None
    network.save_pretrained(directory)
    write_pair_tokenizer(directory, has_types=False)
    return directory


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 3) -> Path:
    """For some projections of encoder and decoder, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in adapted(SlowEncoderDecoder(model).network):
        outputs, inputs = layer.weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.3
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(ADAPTED)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


ADAPTED = ("q", "k", "v", "wi_0", "q_proj", "k_proj", "v_proj", "fc1")


def adapted(network: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in network.named_modules() if name.rpartition(".")[2] in ADAPTED]


class SlowEncoderDecoder:
    """A checkpoint in transformers, one input at a time, with an adapter added to its weights."""

    def __init__(self, path: Path, adapter: Path | None = None) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.network: Any = AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager").eval()
        if adapter is not None:
            from safetensors.torch import load_file

            halves = load_file(adapter / "adapter_model.safetensors")
            for name, layer in adapted(self.network):
                a, b = (halves[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
                layer.weight.data += b @ a
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def token_ids(self, text: str) -> list[int]:
        """The encoder's tokens of a text."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def outputs(
        self, encoder: Sequence[int], num_tokens: int, decoder: Sequence[int] = (START,), **options: Any
    ) -> Any:
        """The tokens behind the decoder's prompt of each output, greedy or by `options` of generate."""
        import torch

        found = self.network.generate(
            input_ids=torch.tensor([list(encoder)]),
            decoder_input_ids=torch.tensor([list(decoder)]),
            max_new_tokens=num_tokens,
            use_cache=False,  # whose size transformers takes from the layers of T5's encoder
            **{"do_sample": False, "num_beams": 1} | options,
        )
        return [[token for token in one.tolist()[len(decoder) :] if token != 0] for one in found]

    def drawn(
        self, encoder: Sequence[int], output: Sequence[int], index: int, seed: int, temperature: float
    ) -> list[int]:
        """Tokens drawn behind the decoder's start and each token of `output`, with this seed's noise.

        If they equal `output`, it was drawn from transformers' logits.
        """
        import torch

        from kernels.sampling.noise import gumbel_noise, row_keys

        decoder = [START, *output[:-1]]
        with torch.inference_mode():
            logits = self.network(
                input_ids=torch.tensor([list(encoder)]), decoder_input_ids=torch.tensor([decoder]), use_cache=False
            ).logits[0]
        positions = torch.arange(1, len(decoder) + 1)
        keys = row_keys(torch.full_like(positions, seed), torch.full_like(positions, index), positions)
        return (logits / temperature + gumbel_noise(keys, logits.shape[1])).argmax(dim=-1).tolist()
