"""`pagewire COMMAND`: runs one command, as its own program or in `python -m`."""

import difflib
import os
import sys
from importlib import import_module

from pagewire_command.commands import CLIENT, COMMANDS

USAGE = """\
usage: pagewire COMMAND [options]

{rows}

pagewire COMMAND --help lists a command's options; pagewire --version prints the version.
"""


def program() -> None:
    """The installed program. Its child processes import the installed packages. Without PYTHONSAFEPATH, `python -m`
    would prefer packages of the current folder, which may be a checkout without kernels."""
    os.environ["PYTHONSAFEPATH"] = "1"
    main()


def main() -> None:
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE.format(rows="\n".join(f"  {name:20}{one.help}" for name, one in COMMANDS.items())))
        return
    if name == "--version":
        from pagewire_common.version import version_of

        sys.stdout.write(f"{version_of('pagewire')}\n")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else "pagewire --help lists all commands"
        sys.exit(f"pagewire: there is no command {name!r}; {hint}")
    module = COMMANDS[name].module
    sys.argv[1:] = [name, *options] if module == CLIENT else options
    try:
        run = import_module(module).main
    except ModuleNotFoundError as error:  # an image has the packages of its service alone
        sys.exit(f"pagewire {name}: the package {error.name!r} is not installed here")
    run("pagewire" if module == CLIENT else f"pagewire {name}")


if __name__ == "__main__":
    main()
