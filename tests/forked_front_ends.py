"""Front ends that a fork server starts for a forked scheduler, in a tenth of the time of `python -m`.

The fork server ends them with their scheduler, as the system does.
"""

import contextlib
import os
import socket
from collections.abc import Sequence

from fork_server import STATUS, Start, ask

from scheduler_service.processes import child


class ForkedFrontEnd:
    """The part of subprocess.Popen that a keeper needs, for a forked child."""

    def __init__(self, status: int) -> None:
        self._status = status
        self.pid = self._read()

    def wait(self) -> int:
        try:
            return self._read()
        finally:
            os.close(self._status)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _read(self) -> int:
        if not (message := os.read(self._status, STATUS.size)):
            raise RuntimeError("the fork server of front ends has ended; its stderr says why")
        return int(STATUS.unpack(message)[0])


def fork_front_ends(control: socket.socket) -> None:
    """Have the keeper of this process, or of its children, ask this fork server for front ends."""

    def start(arguments: Sequence[str], pipe: int) -> ForkedFrontEnd:
        request = Start(child.FRONT_END, list(arguments), dict(os.environ), os.getcwd(), ends_with_reader=True)
        status = ask(control, request, [pipe, 1, 2])
        try:
            return ForkedFrontEnd(status)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(status)
            raise

    child.start_front_end = start
