"""The file of API keys is looked at by its path: whatever comes there counts, and the log says which keys changed."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from engines import until
from locked import KEYS, key_file

from pagewire_common.start_error import StartError
from scheduler_service.access import key_file as module
from scheduler_service.access.key_file import KeyFile
from scheduler_service.access.keys import Keyring

Logs = list[MutableMapping[str, Any]]


@asynccontextmanager
async def watched(file: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Callable[[], Keyring], Logs]]:
    """The keys as they are, and the log."""
    patch.setattr(module, "LOOK_SECONDS", 0.005)
    with structlog.testing.capture_logs() as logs:
        keys = KeyFile(file, None)
        told = [keys.keyring]
        watching = asyncio.create_task(keys.watch(told.append))
        try:
            yield lambda: told[-1] or Keyring([]), logs
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


def replace(file: Path, *names: str) -> None:
    """As editors do."""
    os.replace(key_file(file.with_name("new"), *names), file)


async def test_a_key_that_an_editor_takes_out_opens_nothing_and_the_log_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "keys.toml", "gold", "two")
    async with watched(file, monkeypatch) as (keyring, logs):
        assert keyring().find(KEYS["gold"])
        replace(file, "two", "iron")
        await until(lambda: not keyring().find(KEYS["gold"]))
        assert keyring().find(KEYS["iron"])
        (line,) = [one for one in logs if one["event"] == "API keys read again"]
        assert (line["keys"], line["added"], line["removed"], line["changed"]) == (2, ["iron"], ["gold"], [])
        file.write_text(file.read_text().replace("requests_per_minute = 2", "requests_per_minute = 3"))
        await until(lambda: logs[-1].get("changed") == ["two"])
        assert [one["log_level"] for one in logs] == ["info", "info"]


async def test_a_folder_that_is_swapped_as_kubernetes_does_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, names in (("one", ["gold"]), ("two", ["iron"])):
        (tmp_path / folder).mkdir()
        key_file(tmp_path / folder / "keys.toml", *names)
    (tmp_path / "..data").symlink_to("one")
    file = tmp_path / "keys.toml"
    file.symlink_to("..data/keys.toml")
    async with watched(file, monkeypatch) as (keyring, _):
        (tmp_path / "new").symlink_to("two")
        os.replace(tmp_path / "new", tmp_path / "..data")
        await until(lambda: [*keyring().by_id] == ["iron"])


async def test_a_file_whose_successor_cannot_be_seen_is_an_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a container has mounted is the file and not its name, as is an open file of a process."""
    file = key_file(tmp_path / "keys.toml", "gold")
    with file.open() as mounted:
        async with watched(Path(f"/proc/self/fd/{mounted.fileno()}"), monkeypatch) as (_, logs):
            replace(file, "iron")
            await until(lambda: logs and logs[-1]["log_level"] == "error")
            assert "was replaced" in logs[-1]["event"]
            assert logs[-1]["do"] == "mount its folder, and name the file in it"


def test_a_file_that_is_mounted_by_itself_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path / "keys.toml", "gold")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == file)
    with structlog.testing.capture_logs() as logs:
        KeyFile(file, None)
    assert [one["log_level"] for one in logs] == ["warning"]


async def looked_at(
    file: Path, patch: pytest.MonkeyPatch, *between: Callable[[], object]
) -> tuple[list[list[str]], Logs]:
    """The ids that are told, where one of these happens before each look, and the log."""
    steps = iter(between)

    async def sleep(_: float) -> None:
        if (step := next(steps, None)) is None:
            raise asyncio.CancelledError
        step()

    told: list[list[str]] = []
    with structlog.testing.capture_logs() as logs:
        keys = KeyFile(file, None)
        patch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
        with suppress(asyncio.CancelledError):
            await keys.watch(lambda keyring: told.append(sorted(keyring.by_id)))
    return told, logs


def nothing() -> None: ...


async def test_a_file_that_is_being_written_is_not_read_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "keys.toml", "gold", "iron", "two")
    text = file.read_text()
    of_one, of_two = (text[: text.index("[[key]]", 8 + at)] for at in (0, text.index("[[key]]", 8)))
    told, logs = await looked_at(
        file,
        monkeypatch,
        *(partial(file.write_text, part) for part in ("", of_one, of_two, text + "# changed\n")),
        nothing,
        nothing,
    )
    assert told == [["gold", "iron", "two"]]
    assert [one["log_level"] for one in logs] == ["info"]


async def test_a_file_that_stays_empty_or_is_gone_changes_nothing_and_the_log_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "keys.toml", "gold")
    told, logs = await looked_at(
        file,
        monkeypatch,
        *(partial(file.write_text, ""), nothing, file.unlink, nothing),
        *(partial(replace, file, "iron"), nothing, partial(file.write_text, "key = []"), nothing),
    )
    assert told == [["iron"], []]
    assert [(one["log_level"], one.get("file", str(file))) for one in logs] == [
        *[("error", str(file))] * 2,
        *[("info", str(file))] * 2,
    ]
    assert "it has no [[key]]" in logs[0]["reason"]
    assert "No such file" in logs[1]["reason"]


def test_a_file_without_keys_is_refused_at_the_start_too(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").touch()
    with pytest.raises(StartError, match=r"it has no \[\[key\]\]; to allow no key at all, write key = \[\]"):
        KeyFile(tmp_path / "keys.toml", "plain")
