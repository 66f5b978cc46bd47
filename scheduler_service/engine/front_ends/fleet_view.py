"""The engine's workers and counts at one moment, for a page."""

from scheduler_service.engine.engine import Engine
from scheduler_service.engine.workers import Worker
from scheduler_service.view.workers import WorkerNow


def workers_now(engine: Engine) -> list[WorkerNow]:
    return [_worker_now(worker) for worker in engine.workers.all]


def counts_now(engine: Engine) -> dict[str, int]:
    """Sums since the start, as in AdminService's ClusterState."""
    statistics, departed = engine.requests.statistics, engine.workers.departed
    workers = engine.workers.all
    return {
        "prompt_tokens": statistics.num_prompt_tokens,
        "cached_tokens": statistics.num_cached_tokens,
        "output_tokens": statistics.num_output_tokens,
        "preemptions": departed.num_preemptions + sum(map(_num_preemptions, workers)),
        "losses": departed.num_losses + sum(worker.num_losses for worker in workers),
    }


def _num_preemptions(worker: Worker) -> int:
    scheduler = worker.scheduler
    return worker.num_preemptions + (0 if scheduler is None else sum(scheduler.num_preemptions.values()))


def _worker_now(worker: Worker) -> WorkerNow:
    return WorkerNow(
        address=worker.client.address,
        state=str(worker.state),
        scheduler=worker.scheduler,
        draining=worker.draining,
        epoch=worker.epoch,
        steps=worker.num_steps,
        losses=worker.num_losses,
        preemptions=_num_preemptions(worker),
        error="" if worker.scheduler is not None else worker.last_error,
    )
