"""Run the scheduler service: python -m scheduler_service --help."""

from pagewire_common.serving.server import run
from pagewire_common.settings import load_settings
from pagewire_common.telemetry.logs import configure_logging
from scheduler_service.settings import SchedulerSettings


def main() -> None:
    settings = load_settings(SchedulerSettings, "scheduler_service")
    configure_logging(settings.log_level, settings.log_format)
    settings.log_old_names()
    from scheduler_service.server import serve  # after the check of the flags

    run("scheduler_service", lambda: serve(settings))


if __name__ == "__main__":
    main()
