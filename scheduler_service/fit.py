"""Fit a cost model to a recording, for capacity plans: pagewire fit RECORDING OUT.json

OUT.json is the --cost-model of pagewire simulate. The last line of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scheduler_service.recording.format import RecordingError
from scheduler_service.recording.progress import with_progress
from scheduler_service.recording.replayer import DifferenceError, Replayer
from scheduler_service.simulation.fit import Fit, Measurements, fit

PROGRAM = "scheduler_service.fit"


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="made by scheduler_service --record")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="where the cost model goes")
    parser.add_argument("--worker", metavar="HOST:PORT", help="use only this worker's steps (default: all workers')")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> argparse.Namespace:
    return make_parser(program).parse_args(arguments)


def main(program: str = PROGRAM) -> None:
    arguments = parse_arguments(program=program)
    measurements = Measurements(arguments.worker)
    try:
        try:
            for moment in with_progress(Replayer(), arguments.recording):
                measurements.add(moment)
        except RecordingError as error:
            if not measurements.steps:
                raise
            sys.stderr.write(f"{program}: {error}; fitted to the steps before\n")
        result = fit(measurements.steps, measurements.config)
        result.fields.update(measurements.guesses.fields)
        arguments.out.write_text(json.dumps(result.fields, indent=2) + "\n")
    except (DifferenceError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        sys.exit(f"{program}: {error.filename}: {error.strerror}")
    Console(file=sys.stdout).print(_table(result))
    for doubt in result.doubts():
        sys.stderr.write(f"{program}: warning: {doubt}\n")
    report = {
        "steps": result.num_steps,
        "median_relative_error": result.median_relative_error,
        "r2": result.r2,
        "cost_model": result.fields,
    }
    sys.stdout.write(json.dumps(report) + "\n")


def _table(result: Fit) -> Table:
    table = Table("field", "value")
    for name, value in result.fields.items():
        if name == "layer_groups":
            table.add_row(name, " ".join(":".join(map(str, group)) for group in value))
        elif isinstance(value, list):
            table.add_row(name, " ".join(f"{share:.3f}" for share in value))
        else:
            table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    table.add_row("steps fitted to", f"{result.num_steps:,}", end_section=True)
    table.add_row("median relative error", f"{result.median_relative_error:.1%}")
    table.add_row("R²", f"{result.r2:.3f}")
    return table


if __name__ == "__main__":
    main()
