"""Run the scheduler again from a recording, and check that every plan is equal, byte for byte.

pagewire scheduler --record FILE writes a recording. The last line of output is JSON.
"""

import argparse
import contextlib
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pagewire_common.connection.address import join_address, parse_address, split_address
from pagewire_common.serving.listening import cannot_listen
from scheduler_service.recording.chunks import Chunks
from scheduler_service.recording.format import RecordingError
from scheduler_service.recording.frames import RecordedFrames
from scheduler_service.recording.perfetto import TraceWriter
from scheduler_service.recording.progress import with_progress
from scheduler_service.recording.replayer import DifferenceError, Replayer

EXIT_CODES = """\
exit status:
  0  every decision is the same
  1  a decision differs; the first is named
  2  the recording or the port cannot be used, or only the part before the named byte, which was replayed
"""


PROGRAM = "scheduler_service.replay"
DEFAULT_LISTEN = "127.0.0.1:8001"


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, metavar="FILE", help="a recording; it holds prompts")
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT.json", help="write a trace of workers and requests for ui.perfetto.dev"
    )
    parser.add_argument(
        "--page", action="store_true", help="show the recording in a page for browsers, until a signal arrives"
    )
    parser.add_argument(
        "--http-listen",
        metavar="HOST:PORT",
        type=_address,
        default=DEFAULT_LISTEN,
        help="with --page: address to serve the page on (default %(default)s)",
    )
    return parser


def _address(text: str) -> str:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> argparse.Namespace:
    return make_parser(program).parse_args(arguments)


def main(program: str = PROGRAM) -> None:
    arguments = parse_arguments(program=program)
    with contextlib.ExitStack() as stack:
        # A port in use is named before the replay, which may take minutes.
        listening = stack.enter_context(_listening(program, arguments.http_listen)) if arguments.page else None
        _replay(program, arguments, stack.enter_context(Chunks()), listening)


def _listening(program: str, address: str) -> socket.socket:
    from scheduler_service.frontend.http.page.recording import listening_socket

    try:
        return listening_socket(*split_address(address))
    except OSError:
        sys.stderr.write(f"{program}: {cannot_listen(address, '--http-listen')}\n")
        sys.exit(2)


def _replay(program: str, arguments: argparse.Namespace, chunks: Chunks, listening: socket.socket | None) -> None:
    began = time.perf_counter()
    replayer = Replayer()
    frames = None if listening is None else RecordedFrames(replayer, chunks)
    status, problem = 0, ""
    try:
        with contextlib.ExitStack() as stack:
            trace = None
            if arguments.perfetto is not None:
                trace = TraceWriter(stack.enter_context(arguments.perfetto.open("w")), replayer)
                stack.callback(trace.close)
            if frames is not None:
                stack.callback(frames.close)
            for moment in with_progress(replayer, arguments.recording):
                if trace is not None:
                    trace.add(moment)
                if frames is not None:
                    frames.add(moment)
    except DifferenceError as error:
        status, problem = 1, str(error)
    except RecordingError as error:
        status, problem = 2, str(error)
    except OSError as error:
        status, problem = 2, f"{error.filename}: {error.strerror}"
    if problem:
        sys.stderr.write(f"{program}: {problem}\n")
    report = {
        "events": replayer.num_events,
        "steps": replayer.num_steps,
        "requests": replayer.num_requests,
        "workers": len(replayer.workers),
        "identical": status != 1 and replayer.num_events > 0,
        "complete": status == 0,
        "seconds": time.perf_counter() - began,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    if listening is not None and frames is not None and frames.num_steps:
        from scheduler_service.frontend.http.page.recording import recording_page, serve_recording

        sys.stdout.flush()
        address = join_address(split_address(arguments.http_listen)[0], listening.getsockname()[1])
        sys.stderr.write(f"the recording is at http://{address}; Ctrl-C ends this\n")
        serve_recording(recording_page(arguments.recording, frames, chunks), listening)
    sys.exit(status)


if __name__ == "__main__":
    main()
