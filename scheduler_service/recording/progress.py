"""A progress bar on stderr for a replay."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from scheduler_service.recording.replayer import Moment, Replayer

EVENTS_A_REFRESH = 256  # a refresh of the bar costs more than an event


def with_progress(replayer: Replayer, path: Path) -> Iterator[Moment]:
    """Raises the errors of `Replayer.run`, and OSError for a missing file."""
    size = path.stat().st_size
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress("replay", *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("replay", total=size)
        for count, moment in enumerate(replayer.run(path)):
            if count % EVENTS_A_REFRESH == 0 or moment.end == size:
                progress.update(task, completed=moment.end)
            yield moment
