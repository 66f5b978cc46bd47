"""The commands of the pages: those that need no server run here, and all others are understood by their programs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_commands import PAGES, ROOT, blocks, environment, run
from test_docs import PAGES as ALL

from pagewire_client.cli.parser import parse_arguments as client_arguments
from pagewire_command.commands import CLIENT, COMMANDS
from scheduler_service.fit import parse_arguments as fit_arguments
from scheduler_service.replay import parse_arguments as replay_arguments
from scheduler_service.simulate import parse_arguments as simulate_arguments

PARSERS = {"fit": fit_arguments, "replay": replay_arguments, "simulate": simulate_arguments}
ENDS = re.compile(r"\s(?:[&|;<>]|\d?>+|&&|#).*$")


def client_commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a block whose arguments a parser reads: all but the two services and benchmarks."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r" *(?:\w+=\S+ )*pagewire ([a-z-]+.*)", ENDS.sub("", line))
            if found and "…" not in line:
                yield shlex.split(found[1])


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_block_has_arguments_that_its_program_reads(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *arguments in client_commands(page):
        for word in arguments:
            if re.fullmatch(r"[\w-]+\.\w+", word):
                Path(word).touch()  # a file that the command reads
        if name in PARSERS:
            PARSERS[name](arguments)
        elif COMMANDS[name].module == CLIENT:
            client_arguments([name, *arguments])


def test_every_block_that_is_not_run_says_why() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 10
    for block in found:
        assert block.mark != "not run" or len(block.reason.split()) > 2, block.script
        if re.search(r"\b(docker|kubectl)\b", block.script):
            assert block.mark == "not run", block.script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_need_no_server_succeed(page: Path, tmp_path: Path) -> None:
    """`doctor` imports torch, and runs in another test."""
    scripts = [b.script for b in blocks(page) if not b.mark and not b.calls_server and "doctor" not in b.script]
    scripts += [b.script for b in blocks(page) if b.calls_server and not b.mark and "replay" in b.script]
    if scripts:
        result = run("\n".join(scripts), tmp_path, environment(tmp_path))
        assert result.returncode == 0, result.stdout
