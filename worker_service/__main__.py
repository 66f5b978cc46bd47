"""`python -m worker_service`: run a worker; `--help` lists its settings."""

import os

# torch's own threads shall not spin for milliseconds after one of its loops: our kernels have threads of their own, and
# the scheduler may live on the same cores. The variable counts turns of some 15 ns, and is read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from pagewire_common.server import run
from pagewire_common.settings import load_settings
from worker_service.server import serve
from worker_service.settings import WorkerSettings

if __name__ == "__main__":
    settings = load_settings(WorkerSettings, "worker_service")
    run("worker_service", lambda: serve(settings))
