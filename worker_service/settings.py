"""The settings of a worker: flags and environment variables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from pagewire_common.settings import Address, ServiceSettings
from worker_service.speculative_config import OLD_METHODS, SpeculativeConfig


class WorkerSettings(ServiceSettings):
    """A setting that is None is chosen at start, by model and device."""

    old_names: ClassVar[Mapping[str, str]] = {
        "num_device_blocks": "num_gpu_blocks_override",
        "speculate": "speculative_config",
        "draft_model": "speculative_config",
        "num_speculative_tokens": "speculative_config",
    }

    model: str = Field("default", description="'default', a Hugging Face directory, a GGUF file, or a hub name")
    listen: Address = Field("127.0.0.1:50052", validate_default=True, description="HOST:PORT to serve WorkerService on")
    scheduler_identity: str | None = Field(
        None, description="with --mutual-tls: the name in the scheduler's certificate; only the scheduler may then call"
    )
    metrics_identity: str | None = Field(
        None,
        description="with --mutual-tls: a name that a certificate must have to read metrics, besides the scheduler's",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is a GPU, else cpu")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="type of weights and cache; auto: as in the checkpoint"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: the checkpoint's weights; dummy: random ones, from config.json alone"
    )
    quantization: Literal["none", "fp8", "int8", "w8a8", "int4", "gguf"] = Field(
        "none",
        description="number format of weights, for models that run natively. fp8: e4m3 for weights and inputs of "
        "products, half the memory on GPUs that multiply fp8. On CPUs with bf16: int8: half the memory to read, for "
        "few sequences at once, needs AVX-512 BF16; w8a8: half the memory, products of integers; int4: a third of the "
        "memory, products of integers; gguf: as in the model's GGUF file",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="processes, each on a GPU of its own or on its share of the cores, that together "
        "hold the weights, the cache and the adapters of a natively run model",
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV cache block")
    num_gpu_blocks_override: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="KV cache blocks on the device, a GPU or a CPU; by default as many as fit into memory",
    )
    kv_cache_memory: float | None = Field(
        None,
        gt=0,
        le=2**20,
        description="GiB of KV cache, without --num-gpu-blocks-override; by default a quarter of free memory on a CPU, "
        "and what --gpu-memory-utilization leaves on a GPU",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="type of keys and values. auto: as --dtype; int8 and fp8: with a scale for every head and token, "
        "nearly half the memory of 16 bits; fp8 (e4m3) only on GPUs that support it",
    )
    swap_space: float = Field(1.0, ge=0, le=2**20, description="GiB of host memory for swapped blocks")
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="most tokens computed in one step; by default at least an encoder's longest text"
    )
    max_num_seqs: int = Field(256, ge=1, description="most sequences computed in one step")
    max_model_len: int | None = Field(None, ge=1, description="most tokens of a sequence; by default the model's limit")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the GPU's memory to use in all")
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="keep whole contexts in the KV cache also for layers with a sliding window, as beside a network "
        "that drafts, if other layers have no window",
    )
    enforce_eager: bool = Field(
        False,
        description="on a GPU, launch the kernels of steps one by one, without CUDA graphs captured at start, whose "
        "memory comes on top of --gpu-memory-utilization",
    )
    batch_invariant: bool = Field(
        False,
        description="sum up each token's numbers in one order, so that tokens in 16 bits are the same alone, in a "
        "batch, in chunks, after preemption and after the loss of a worker; for natively run models. On a CPU, bf16 "
        "needs no flag; on a GPU, other kernels are used, whose cost was not measured",
    )
    forms: bool = Field(
        True,
        description="follow the forms that requests ask for (json_schema, regex, choice, grammar), in a process beside "
        "the worker; not where several processes share the model",
    )
    encoder_cache_size: int = Field(
        16_384,
        ge=0,
        le=2**31 - 1,
        description="tokens of images and sounds in prompts whose embeddings are kept, for models that read them; 0: "
        "images and sounds are refused",
    )
    encoder_budget: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="most tokens of images and sounds encoded in one step; 0: one image, one tile of it, or one sound",
    )
    speculative_config: str | None = Field(
        None,
        validate_default=True,
        description="draft tokens, and verify several in a step where that is faster; the outputs are the same. JSON "
        "with the keys method, model, num_speculative_tokens (8), prompt_lookup_min (2) and prompt_lookup_max (16). "
        "ngram: repeats what followed the same tokens in the prompt or output; draft_model: the drafts of a smaller "
        '"model" with the same vocabulary; eagle3: of an EAGLE-3 head, the "model"; mtp: of the checkpoint\'s layer '
        "for multi-token prediction",
    )
    max_loras: int = Field(
        0, ge=0, le=256, description="most low-rank adapters in one step, for which memory is set aside on the device"
    )
    max_lora_rank: int = Field(16, ge=1, le=512, description="largest rank of an adapter")
    max_cpu_loras: int = Field(256, ge=1, le=2**16, description="most adapters held in host memory")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the forward pass in each process; by default one a core, shared out among them",
    )
    cache: Path = Field(Path("~/.cache/pagewire"), description="folder for downloaded and converted models")

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _as_text(cls, config: object) -> object:
        return json.dumps(config) if isinstance(config, Mapping) else config

    @field_validator("speculative_config")
    @classmethod
    def _drafts_in_one_process(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None:
            return None
        config = SpeculativeConfig.parse(text)
        if config.method != "ngram" and info.data.get("tensor_parallel_size") != 1:
            raise ValueError(f'"{config.method}" is for a model that one process holds; use the method "ngram"')
        return text

    @classmethod
    def translate(cls, values: Mapping[str, str]) -> dict[str, str]:
        new = {cls.old_names[old]: value for old, value in values.items() if old == "num_device_blocks"}
        speculate = values.get("speculate", "none")
        if speculate == "none":
            if "draft_model" in values:
                raise ValueError("--draft-model: it goes together with --speculate draft and eagle")
            return new
        if speculate not in OLD_METHODS:
            raise ValueError(f"--speculate: it may be none, {', '.join(OLD_METHODS)} (got {speculate!r})")
        config: dict[str, object] = {"method": OLD_METHODS[speculate]}
        if "draft_model" in values:
            config["model"] = values["draft_model"]
        if "num_speculative_tokens" in values:
            config["num_speculative_tokens"] = _whole_number(
                "--num-speculative-tokens", values["num_speculative_tokens"]
            )
        return new | {"speculative_config": json.dumps(config)}

    @field_validator("scheduler_identity", "metrics_identity")
    @classmethod
    def _needs_certificates(cls, identity: str | None, info: ValidationInfo) -> str | None:
        if identity and not info.data.get("mutual_tls"):
            raise ValueError("it needs --mutual-tls; without mutual TLS, callers show no certificate")
        return identity

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """None if the worker drafts no tokens."""
        return SpeculativeConfig.parse(self.speculative_config) if self.speculative_config is not None else None

    @property
    def num_drafts(self) -> int:
        """Maximum drafts of one sequence in one step; 0 without drafts."""
        return self.speculation.num_speculative_tokens if self.speculation is not None else 0

    @property
    def metrics_readers(self) -> list[str]:
        """Names in certificates of clients that may read the metrics; empty for every client."""
        return [name for name in (self.scheduler_identity, self.metrics_identity) if name]


def _whole_number(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{flag}: {text!r} is no whole number")
    return int(text)
