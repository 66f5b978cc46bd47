"""Run the scheduler service: pagewire scheduler --help."""

import sys

from pagewire_common.settings import load_settings
from pagewire_common.start_error import StartError
from pagewire_common.telemetry.logs import configure_logging
from scheduler_service.processes.keeper import Place, keep
from scheduler_service.settings import SchedulerSettings

NAME = "scheduler_service"


def main(program: str = NAME) -> None:
    settings = load_settings(SchedulerSettings, program)
    configure_logging(settings.log_level, settings.log_format)
    settings.log_old_names()

    def run_engine(place: Place, pipe: int) -> None:
        from pagewire_common.serving.server import run
        from scheduler_service.server import serve

        run(program, lambda: serve(settings, place, pipe))

    try:
        sys.exit(keep(settings, run_engine))
    except StartError as error:
        sys.exit(f"{program}: {error}")


if __name__ == "__main__":
    main()
