"""`python -m worker_service` runs a worker. The option `--help` lists the worker's settings."""

import os
import sys

# By default, the OpenMP threads of torch spin for milliseconds after a parallel loop. They would take the cores from
# the threads of the CPU kernels and from a scheduler on the same machine. GOMP_SPINCOUNT limits the number of spins,
# each of which takes about 15 ns. GOMP_SPINCOUNT must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from pagewire_common.serving.server import run
from pagewire_common.settings import load_settings
from pagewire_common.telemetry.logs import configure_logging
from worker_service.parallel import is_rank
from worker_service.serving.rank_process import run_rank
from worker_service.serving.server import serve
from worker_service.settings import WorkerSettings


def main() -> None:
    """Run the worker in this process, or start a process for each rank of the worker."""
    settings = load_settings(WorkerSettings, "worker_service")
    configure_logging(settings.log_level, settings.log_format)
    if not is_rank():
        settings.log_old_names()
    if settings.tensor_parallel_size == 1:
        run("worker_service", lambda: serve(settings))
    elif is_rank():
        run("worker_service", lambda: run_rank(settings))
    else:
        from worker_service.serving.launcher import launch  # the launcher imports torch

        sys.exit(launch([sys.executable, "-m", "worker_service", *sys.argv[1:]], settings.tensor_parallel_size))


if __name__ == "__main__":
    main()
