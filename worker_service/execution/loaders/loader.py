"""The interface of loaders."""

from abc import ABC, abstractmethod

from pagewire_common.start_error import StartError
from worker_service.execution.adapters.adapters import Adapters
from worker_service.execution.startup.device import describe_device
from worker_service.execution.startup.network import Network
from worker_service.execution.steps.model_runner import Runner
from worker_service.session.step import Limits, PoolingType, WorkerInfo
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Drafter


class Loader(ABC):
    """Loads one model. Each method is called once, in the order of definition. Methods before `load` allocate no memory
    for weights."""

    adapters: Adapters
    """Set by `load`."""

    def __init__(self, settings: WorkerSettings, target: Network) -> None:
        """Raises StartError if the settings do not fit the model."""
        self.settings = settings
        self.target = target
        self.max_model_len = _choose_max_model_len(settings, target.max_model_len)

    @abstractmethod
    def check(self) -> list[int]:
        """Check the weights' files. Returns each weight's maximum bytes, see `Network.check`."""

    @abstractmethod
    def load(self) -> None:
        """Allocate and read the weights. Raises StartError, and torch's errors if memory runs out."""

    @abstractmethod
    def measure(self) -> int:
        """Compute a trial step of the largest size. Returns the prefill speed in tokens a second."""

    @abstractmethod
    def make_ready(self) -> Runner:
        """Allocate the KV cache, if any, and create the runner. Raises the errors that `load` raises."""

    def drafter(self, runner: Runner, speed: int) -> Drafter | None:
        """The first rank's drafter, or None in other ranks and without speculation. speed: the result of `measure`."""
        del runner, speed
        return None

    def info(self, fingerprint: str, speed: int) -> WorkerInfo:
        """All ranks must call this method, because they may exchange measurements."""
        target = self.target
        return WorkerInfo(
            model_id=target.model_id,
            model_fingerprint=fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            device=describe_device(target.device, target.ranks.size),
            features=(),
            sliding_window=0,
            swap_bytes_per_second=0,
            prefill_tokens_per_second=speed,
            block_bytes=0,
            pooling_type=PoolingType[target.sentences.pooling],
            normalizes=target.sentences.normalizes,
        )

    def limits(self) -> Limits:
        return Limits(
            block_size=self.settings.block_size,
            num_device_blocks=0,
            num_host_blocks=0,
            vocabulary_size=self.target.config.vocabulary_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_num_seqs=self.settings.max_num_seqs,
        )

    @abstractmethod
    def explain(self, error: Exception) -> StartError | None:
        """A StartError that explains an error of loading, or None for a fault of the worker's own code."""


def _choose_max_model_len(settings: WorkerSettings, most: int) -> int:
    if settings.max_model_len is None:
        return most
    if settings.max_model_len > most:
        raise StartError(f"--max-model-len is {settings.max_model_len}; the model's limit is {most}")
    return settings.max_model_len
