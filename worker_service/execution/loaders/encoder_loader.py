"""Loads an encoder, which has no cache and does not sample."""

from dataclasses import replace
from typing import TYPE_CHECKING

from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.loaders.loader import Loader
from worker_service.execution.startup.network import Network
from worker_service.execution.startup.profiling import measure_encoder
from worker_service.execution.steps.encoder_runner import EncoderRunner
from worker_service.session.step import Limits, WorkerInfo
from worker_service.settings import WorkerSettings

if TYPE_CHECKING:
    from worker_service.models.encoders.encoder import Encoder  # this import loads transformers


class EncoderLoader(Loader):
    """Loads a network that reads whole texts and returns vectors or scores."""

    def __init__(self, settings: WorkerSettings, target: Network) -> None:
        """Raises StartError if a flag does not suit an encoder, or if the longest text does not fit into a step."""
        _check_flags(settings, target)
        super().__init__(settings, target)
        if settings.max_num_batched_tokens < self.max_model_len:
            if "max_num_batched_tokens" in settings.model_fields_set:
                raise StartError(
                    f"--max-num-batched-tokens is {settings.max_num_batched_tokens}; an encoder computes a text whole, "
                    f"and {target.model_id} reads up to {self.max_model_len} tokens: raise it, or lower --max-model-len"
                )
            self.settings = settings.model_copy(update={"max_num_batched_tokens": self.max_model_len})
        self._model: Encoder
        self._runner: EncoderRunner

    def check(self) -> list[int]:
        return self.target.check()

    def load(self) -> None:
        self._model, self.adapters = self.target.load()
        self._runner = EncoderRunner(self._model, self.target.device)

    def measure(self) -> int:
        """Measure the speed with texts of the maximum length."""
        most_tokens, num_labels = self.settings.max_num_batched_tokens, self._model.config.num_labels
        return measure_encoder(self._runner, self.max_model_len, most_tokens, num_labels)

    def make_ready(self) -> EncoderRunner:
        return self._runner

    def info(self, fingerprint: str, speed: int) -> WorkerInfo:
        """A classifier has no pooling type."""
        found = super().info(fingerprint, speed)
        return replace(found, pooling_type=None) if self._model.config.num_labels else found

    def limits(self) -> Limits:
        num_labels = self._model.config.num_labels
        embedding_size = 0 if num_labels else self.target.config.hidden_size
        return replace(super().limits(), embedding_size=embedding_size, num_labels=num_labels)

    def explain(self, error: Exception) -> StartError:
        """Explain an error of any type: for unusual values in config.json, transformers' code may raise any."""
        settings = self.settings
        if is_out_of_memory(error):
            return StartError(f"{settings.model} does not fit into the memory of {self.target.device.type}")
        return StartError(f"{settings.model} cannot be computed: {type(error).__name__}: {error}")


def _check_flags(settings: WorkerSettings, target: Network) -> None:
    for name, is_set in (
        ("--speculative-config", settings.speculative_config is not None),
        ("--max-loras", settings.max_loras > 0),
        ("--num-gpu-blocks-override", settings.num_gpu_blocks_override is not None),
        ("--kv-cache-dtype", settings.kv_cache_dtype != "auto"),
    ):
        if is_set:
            raise StartError(f"{name} is for models that generate text; {target.model_id} is an encoder")
