"""Run a worker: pagewire worker --help."""

import os
import sys

# By default, torch's OpenMP threads spin for milliseconds after a parallel loop, on cores that other threads need. One
# spin takes about 15 ns. The variable must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from pagewire_common.serving.server import run
from pagewire_common.settings import load_settings
from pagewire_common.telemetry.logs import configure_logging
from worker_service.parallel import is_rank
from worker_service.serving.rank_process import run_rank
from worker_service.serving.server import serve
from worker_service.settings import WorkerSettings


def main(program: str = "worker_service") -> None:
    settings = load_settings(WorkerSettings, program)
    configure_logging(settings.log_level, settings.log_format)
    if not is_rank():
        settings.log_old_names()
    if settings.tensor_parallel_size == 1:
        run(program, lambda: serve(settings))
    elif is_rank():
        run(program, lambda: run_rank(settings))
    else:
        from worker_service.serving.launcher import launch  # the launcher imports torch

        sys.exit(launch([sys.executable, "-m", "worker_service", *sys.argv[1:]], settings.tensor_parallel_size))


if __name__ == "__main__":
    main()
