"""`pagewire completion SHELL`: prints a script that completes commands, flags, choices and file names."""

import argparse
import sys

import shtab
from pydantic_settings import CliSettingsSource

from bench.__main__ import BENCHES
from pagewire_client.cli.parser import add_commands
from pagewire_command import doctor
from pagewire_command.commands import COMMANDS
from scheduler_service import fit, replay, simulate
from scheduler_service.settings import SchedulerSettings
from worker_service.settings import WorkerSettings

SHELLS = ("bash", "zsh", "fish")
HOW = """\
To install, for new shells:

  pagewire completion bash > ~/.local/share/bash-completion/completions/pagewire
  pagewire completion zsh  > FOLDER/_pagewire       # a FOLDER of $fpath
  pagewire completion fish > ~/.config/fish/completions/pagewire.fish
"""


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, epilog=HOW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def every_parser() -> argparse.ArgumentParser:
    """A parser of all commands."""
    root = argparse.ArgumentParser(prog="pagewire")
    commands = root.add_subparsers()
    add_commands(commands)
    for name, settings in (("scheduler", SchedulerSettings), ("worker", WorkerSettings)):
        CliSettingsSource(settings, root_parser=commands.add_parser(name, help=COMMANDS[name].help))
    for name, module in (("replay", replay), ("fit", fit), ("simulate", simulate), ("doctor", doctor)):
        parents = [module.make_parser(name)]
        commands.add_parser(name, parents=parents, add_help=False, help=COMMANDS[name].help)
    commands.add_parser("bench", help=COMMANDS["bench"].help).add_argument("name", choices=list(BENCHES))
    commands.add_parser("completion", help=COMMANDS["completion"].help).add_argument("shell", choices=SHELLS)
    for parser in commands.choices.values():
        for action in parser._actions:
            if any(word in str(action.metavar or action.dest).lower() for word in ("file", "folder", "path", "model")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return root


def main(program: str) -> None:
    shell = make_parser(program).parse_args().shell
    sys.stdout.write(shtab.complete(every_parser(), shell))
