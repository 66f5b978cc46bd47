"""`python -m worker_service`: run a worker; `--help` lists its settings."""

from pagewire_common.server import run
from pagewire_common.settings import load_settings
from worker_service.server import serve
from worker_service.settings import WorkerSettings

if __name__ == "__main__":
    settings = load_settings(WorkerSettings, "worker_service")
    run("worker_service", lambda: serve(settings))
