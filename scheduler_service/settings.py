"""The scheduler service's settings."""

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from pagewire_common.settings import Address, ServiceSettings
from scheduler_service.core import PhaseRule, PreemptionMode
from scheduler_service.lora_modules import parse_modules
from scheduler_service.policies import checked_policy
from scheduler_service.targets import is_name, parse_target

# Above this, a step's answer could exceed the size limit of a gRPC message.
MAX_BATCHED_TOKENS = 131_072
MAX_SEQS = 8192
MIN_SECRET = 16

_ORIGIN = re.compile(r"\*|https?://[^\s/,@?#]+")
_MEDIA_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def _parse_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is no origin: it must be *, or http:// or https:// and a host, without a path")
    return origin.lower()


def _parse_media_host(host: str) -> str:
    if not _MEDIA_HOST.fullmatch(host):
        raise ValueError(
            f"{host!r} is no host: it must be a name or an address, such as images.example.com, or :PORT after it"
        )
    return host.lower()


Target = Annotated[str, AfterValidator(parse_target)]
Origin = Annotated[str, AfterValidator(_parse_origin)]
MediaHost = Annotated[str, AfterValidator(_parse_media_host)]


def _split(value: object) -> object:
    """`--flag a,b` means `--flag a --flag b`."""
    values = [value] if isinstance(value, str) else value
    return [part for item in values for part in item.split(",") if part] if isinstance(values, list) else values


class SchedulerSettings(ServiceSettings):
    """The scheduler plans the steps of the workers and streams generated tokens to clients."""

    old_names: ClassVar[Mapping[str, str]] = {
        "policy": "scheduling_policy",
        "overtakes": "priority_aging",
        "lora": "lora_modules",
        "max_prefill_chunk": "long_prefill_token_threshold",
    }
    several: ClassVar[frozenset[str]] = frozenset({"lora_modules"})

    model: str | None = Field(
        None,
        description="refuse workers that serve another model: 'default', a Hugging Face directory, a GGUF file, or a "
        "hub name; by default the first worker decides",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="the model's name for clients and in metrics; by default the workers' name for it",
    )
    listen: Address = Field("127.0.0.1:50051", validate_default=True, description="HOST:PORT to serve clients on")
    http_listen: Address | None = Field(
        None, description="HOST:PORT to serve OpenAI's HTTP API on, such as 127.0.0.1:8000; by default gRPC alone"
    )
    http_allow_origin: Annotated[list[Origin], NoDecode, BeforeValidator(_split)] = Field(
        [],
        description="origins, separated by commas, of which pages in browsers may call the HTTP API, such as "
        "https://chat.example.com; * allows all; by default none",
    )
    allow_media_host: Annotated[list[MediaHost], NoDecode, BeforeValidator(_split)] = Field(
        [],
        description="hosts, separated by commas, from which images in HTTP requests are fetched, such as "
        "images.example.com or images.example.com:8443; by default none, and images come inside requests",
    )
    page: bool = Field(True, description="serve a page for browsers at / of the HTTP port")
    learn_pipe: int | None = Field(
        None,
        ge=3,
        description="file descriptor by which the page asks pagewire serve to kill its worker and start it again",
    )
    response_template: Path | None = Field(
        None,
        description="JSON file that says how the model writes reasoning and tool calls, in transformers' format of "
        "response templates; by default the model's own, or the known form that its chat template contains",
    )
    receive_timeout: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that an HTTP connection may be open, or idle after an answer, until the head of a request "
        "has arrived, and that the request's body may take",
    )
    admin_listen: Address = Field(
        "127.0.0.1:50053",
        description="HOST:PORT to serve AdminService on, for operators; by default from this machine alone",
    )
    api_keys: Path | None = Field(
        None,
        description="file of API keys: every call except health checks then needs a key; read again when it changes",
    )
    api_key: SecretStr | None = Field(
        None,
        description="one API key with all rights; set it in the environment, because other users can see a command's "
        "flags",
    )
    resume_secret: SecretStr | None = Field(
        None,
        validate_default=True,
        description="key that signs the ids of events over HTTP; schedulers with the same key resume each other's "
        "streams; set it in the environment; by default a new key at each start",
    )
    frontends: int = Field(
        1,
        ge=1,
        le=64,
        description="front-end processes, which serve clients, tokenize and detokenize, on the same port",
    )
    workers: Annotated[list[Target], NoDecode, BeforeValidator(_split), Field(min_length=1)] = Field(
        ["127.0.0.1:50052"],
        description="addresses of workers, separated by commas: HOST:PORT, or dns:///NAME:PORT for all addresses of a "
        "name",
    )
    lora_modules: Annotated[list[str], NoDecode, BeforeValidator(parse_modules)] = Field(
        [],
        description="low-rank adapters that requests can name, separated by spaces or commas: NAME=FOLDER, as PEFT "
        'saves one, or {"name": NAME, "path": FOLDER}',
    )
    lora_dir: Path | None = Field(
        None, description="folder with a folder for each adapter; operators can load more adapters from it later"
    )
    worker_tls: Path | None = Field(
        None,
        description="folder with ca.crt, and tls.crt and tls.key if workers want a certificate: connect to workers by "
        "TLS; by default in plain text",
    )
    worker_identity: str | None = Field(
        None,
        validate_default=True,
        description="name that every worker's certificate must have; by default the host that --workers names",
    )
    discovery_interval: float = Field(5.0, gt=0, description="seconds between look-ups of the names among --workers")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_BATCHED_TOKENS,
        description="maximum tokens of a step, if below a worker's own limit; by default each worker's limit",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=MAX_SEQS,
        description="maximum sequences of a step, if below a worker's own limit; by default each worker's limit",
    )
    long_prefill_token_threshold: int | None = Field(
        None,
        ge=0,
        description="maximum tokens of one prompt in a step that other requests need too; 0: no limit; by default a "
        "quarter of the step",
    )
    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="connections of clients to each front end; further connections are closed"
    )
    max_num_requests: int = Field(
        4096, ge=1, description="maximum requests in flight; further requests get RESOURCE_EXHAUSTED"
    )
    request_memory: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="GiB of memory for requests in flight; further requests get RESOURCE_EXHAUSTED; unread output may "
        "use a quarter more",
    )
    max_in_flight_steps: int = Field(
        2, ge=1, le=8, description="steps sent to a worker before the oldest is answered; 1 waits for each answer"
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="share of device blocks that admission leaves free")
    phase_rule: PhaseRule = Field(
        PhaseRule.CHUNKED,
        description="chunked: prompts and decodes share a step; separate: each step has only prompts or only decodes",
    )
    delay_factor: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="with separate phases only: hold prompts back until one has waited for this many times the last "
        "prompt step",
    )
    scheduling_policy: Annotated[str, AfterValidator(checked_policy)] = Field(
        "fcfs",
        description="the next request; fcfs: the first to arrive; priority: the lowest number; fair: of the tenant "
        "served least; another name: a policy of an installed package",
    )
    priority_aging: int = Field(
        64,
        ge=1,
        description="priority policy: later arrivals that may overtake a request, for each level of better priority",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description='fair policy: shares of tenants, as JSON: {"gold": 3}; 1 for other tenants'
    )
    prefix_caching: bool = Field(True, description="reuse the KV blocks of prompts with the same beginning")
    preemption_mode: PreemptionMode = Field(
        PreemptionMode.AUTO, description="how preempted requests continue; auto: the cheaper way"
    )
    no_worker_timeout: float = Field(
        60.0, ge=0, description="seconds that a request waits while no worker is connected"
    )
    step_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds of a step after which its worker counts as lost, or ten times the worker's largest step if"
        " that is longer",
    )
    health_interval: float = Field(
        1.0,
        gt=0,
        description="seconds between health checks of a worker that answers no steps, and the limit of each check; "
        "after three failures in a row the worker counts as lost",
    )
    stall_timeout: float = Field(60.0, gt=0, description="seconds a client may leave a message unread")
    undeclared_keys: bool = Field(
        False,
        description="allow keys that the schema of a JSON object does not name, if the schema names some and has no "
        "additionalProperties; never in strict requests",
    )
    enable_prompt_embeds: bool = Field(
        False, description="take prompt_embeds: embeddings as parts of a prompt; API keys need a permission, too"
    )
    vllm_metric_names: bool = Field(False, description="export vLLM's metrics under vLLM's names too, vllm:…")
    record: Path | None = Field(
        None,
        description="new file for a recording of every request and decision; it contains all prompts and outputs as "
        "token ids",
    )
    check_invariants: bool = Field(False, description="verify the block tables after every step; for tests")

    @classmethod
    def translate(cls, values: Mapping[str, str]) -> dict[str, str]:
        new = super().translate(values)
        # the old value 0 meant a quarter of the step's tokens, now the default
        if new.get("long_prefill_token_threshold") == "0":
            del new["long_prefill_token_threshold"]
        return new

    @field_validator("resume_secret")
    @classmethod
    def _is_long_or_new(cls, resume_secret: SecretStr | None) -> SecretStr:
        """A new secret is that of all engines which this process starts."""
        secret = resume_secret or SecretStr(secrets.token_hex(MIN_SECRET))
        if len(secret) < MIN_SECRET:
            raise ValueError(f"it must have at least {MIN_SECRET} characters")
        return secret

    @property
    def resume_key(self) -> bytes:
        """The key of the signatures of event ids, 32 bytes."""
        assert self.resume_secret is not None
        return blake2b(self.resume_secret.get_secret_value().encode(), digest_size=32).digest()

    @field_validator("worker_identity")
    @classmethod
    def _needs_a_name(cls, worker_identity: str | None, info: ValidationInfo) -> str | None:
        has_names = any(is_name(target) for target in info.data.get("workers", ()))
        if info.data.get("worker_tls") is not None and has_names and not worker_identity:
            raise ValueError("with --worker-tls and a dns:/// name, say which name the workers' certificates have")
        return worker_identity

    @field_validator("delay_factor")
    @classmethod
    def _holds_back_separate_phases_only(cls, delay_factor: float, info: ValidationInfo) -> float:
        if delay_factor and info.data.get("phase_rule") is PhaseRule.CHUNKED:
            raise ValueError(
                "chunked phases hold no prompts back, because prompts share the steps of the decodes; "
                "leave it at 0, or give --phase-rule separate as well"
            )
        return delay_factor
