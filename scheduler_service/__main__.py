"""Run the scheduler service: python -m scheduler_service --help."""

import os
import sys

from pagewire_common.logs import configure_logging
from pagewire_common.server import run
from pagewire_common.settings import load_settings
from scheduler_service.settings import SchedulerSettings


def main() -> None:
    settings = load_settings(SchedulerSettings, "scheduler_service")
    configure_logging(settings.log_level, settings.log_format)
    # For a tokenizer transformers would load torch wherever it finds it: 3.0 s and 459 MiB instead of 0.9 and 126.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is none
    # Imported after the flags are known to be good.
    from scheduler_service.server import serve

    run("scheduler_service", lambda: serve(settings))


if __name__ == "__main__":
    main()
