"""Folders of processes that were killed are removed by the next start; those of others are not even looked into."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import running

from pagewire_common.processes.temporary import TemporaryFolder, remove_dead_folders
from scheduler_service.engine.adapters.catalogue import Catalogue
from scheduler_service.settings import SchedulerSettings


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of all users. Its path is short, as a socket's must be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_others_use_stays(shared: Path) -> None:
    killed = (
        "import os, signal; from pagewire_common.processes.temporary import TemporaryFolder; "
        "folder = TemporaryFolder('adapters'); (folder.path / 'copy').write_bytes(bytes(9)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(shared)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(names_in(shared)) == 1
    with TemporaryFolder("engine") as used:
        remove_dead_folders()
        assert names_in(shared) == [used.name]
        assert used.stat().st_mode & 0o777 == 0o700
    assert not names_in(shared)


def test_a_schedulers_copies_of_adapters_are_among_them(shared: Path, adapters: Path) -> None:
    catalogue = Catalogue(SchedulerSettings(lora_dir=adapters))
    copies = catalogue._copies
    assert copies is not None
    assert len(names_in(copies.path)) == 3
    remove_dead_folders()
    assert copies.path.exists()
    os.close(copies._lock or 0)  # as when its process is killed
    copies._lock = None
    remove_dead_folders()
    assert not copies.path.exists()


def test_what_is_not_this_users_own_is_passed_over(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = shared / "precious"
    precious.mkdir(0o700)
    (precious / "file").touch()
    (shared / "pagewire-tmp-link").symlink_to(precious)
    (shared / "pagewire-tmp-open").mkdir(0o755)
    (shared / "pagewire-tmp-file").touch(0o600)
    os.mkfifo(shared / "pagewire-tmp-pipe", 0o600)
    before = names_in(shared)
    remove_dead_folders()
    assert names_in(shared) == before
    (shared / "pagewire-tmp-of-another").mkdir(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_dead_folders()
    assert "pagewire-tmp-of-another" in names_in(shared)
    remove_dead_folders()
    assert names_in(shared) == before
    assert names_in(precious) == ["file"]


def test_where_no_folder_can_be_locked_that_is_said_and_none_is_left(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=f"no folder in {shared} can be locked"):
        TemporaryFolder("adapters")
    assert not names_in(shared)


async def test_a_socket_whose_backlog_is_full_keeps_no_scheduler_from_starting(shared: Path) -> None:
    """Another user's, whose backlog is full: to connect to it would wait for ever."""
    for name in ("pagewire-other", "pagewire-tmp-other"):
        (shared / name).mkdir()
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as waiting:
            listening.bind(str(shared / name / "engine"))
            listening.listen(0)
            waiting.connect(str(shared / name / "engine"))
            remove_dead_folders()
            async with running("127.0.0.1:1", time_limit=10):
                pass
    assert names_in(shared) == ["pagewire-other", "pagewire-tmp-other"]
