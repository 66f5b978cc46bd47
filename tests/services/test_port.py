"""Front ends share their port with each other and with no other service."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire_common.start_error import StartError
from scheduler_service.processes.port import reserved


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_is_taken_once(host: str) -> None:
    with (
        reserved(f"{host}:0") as listen,
        pytest.raises(StartError, match="use by another process"),
        reserved(listen),
    ):
        pass
    with reserved(listen) as again:
        assert again == listen


def test_a_port_at_which_another_server_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            with pytest.raises(StartError, match="use by another process"), reserved(f"{host}:{port}"):
                pass


@pytest.mark.parametrize(("one", "other"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])
def test_a_port_is_taken_at_every_address_before_anything_listens(one: str, other: str) -> None:
    with reserved(f"{one}:0") as listen:
        port = listen.rpartition(":")[2]
        with pytest.raises(StartError, match="use by another process"), reserved(f"{other}:{port}"):
            pass
        with reserved(f"127.0.0.2:{port}") if one == "127.0.0.1" else contextlib.nullcontext():
            pass  # another address is another service's


def test_a_port_that_is_free_in_a_moment_is_waited_for() -> None:
    """As that of a scheduler that was killed, whose front ends end after it."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        waiting = reserved(listen, patience=60)
        entered = thread.submit(waiting.__enter__)
        assert not entered.done()
        server.close()
        assert entered.result() == listen
        waiting.__exit__(None, None, None)


def test_of_two_that_take_a_port_at_once_one_has_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"

    def take(_: int) -> bool:
        try:
            stack = reserved(listen)
            stack.__enter__()
        except StartError:
            return False
        held.append(stack)
        return True

    held: list[object] = []
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(64))) == 1
    held[0].__exit__(None, None, None)


def test_a_port_may_be_taken_again_right_after_a_server_that_does_not_share_it() -> None:
    """Its connections linger for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()):
            connection, _ = server.accept()
            connection.close()  # the side that closes first lingers
    with reserved(listen):
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1 is not an address of this machine"), reserved("192.0.2.1:0"):
        pass
