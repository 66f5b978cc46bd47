"""Loads a worker: the model with its KV cache on a device, and the model's properties."""

from dataclasses import dataclass
from pathlib import Path

from pagewire_common.start_error import StartError
from worker_service.execution.adapters.adapters import Adapters
from worker_service.execution.loaders.encoder_loader import EncoderLoader
from worker_service.execution.loaders.generator_loader import GeneratorLoader
from worker_service.execution.loaders.loader import Loader
from worker_service.execution.startup.capacity import check_room_for_weights
from worker_service.execution.startup.device import choose_device, set_threads, warn_if_eager
from worker_service.execution.startup.network import Network
from worker_service.execution.steps.model_runner import Runner
from worker_service.parallel.ranks import Ranks, join_ranks
from worker_service.progress import stage
from worker_service.session.step import Limits, WorkerInfo
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Drafter


@dataclass(frozen=True)
class Worker:
    """The objects of a loaded worker, which its sessions use."""

    ranks: Ranks
    info: WorkerInfo
    limits: Limits
    runner: Runner
    tokenizer_files: list[Path]
    adapters: Adapters
    drafter: Drafter | None = None


def load_worker(settings: WorkerSettings) -> Worker:
    """Find, load and measure the model, and allocate the KV cache. Raises StartError. Every rank calls this function,
    and loads its part."""
    device = choose_device(settings)
    set_threads(settings)
    ranks = join_ranks(settings.tensor_parallel_size, device)
    warn_if_eager(device)
    target = Network.open(settings.model, settings, device, ranks)
    loader = EncoderLoader(settings, target) if target.is_encoder else GeneratorLoader(settings, target)
    try:
        return _load(loader)
    except StartError:
        raise
    except Exception as error:
        explained = loader.explain(error)
        if explained is None:
            raise
        raise explained from error


def _load(loader: Loader) -> Worker:
    target = loader.target
    # Errors are found before memory is allocated for the weights.
    stage("checking weights")
    check_room_for_weights(target.device, target.dtype, loader.check(), target.ranks)
    stage("fingerprinting weights")
    # A draft model is not included, because drafts do not change an output.
    fingerprint = target.fingerprint() if target.ranks.rank == 0 else ""
    stage("loading weights")
    loader.load()
    stage("measuring the largest step")
    speed = loader.measure()
    runner = loader.make_ready()
    return Worker(
        ranks=target.ranks,
        info=loader.info(fingerprint, speed),
        limits=loader.limits(),
        runner=runner,
        tokenizer_files=target.tokenizer_files,
        adapters=loader.adapters,
        drafter=loader.drafter(runner, speed),
    )
