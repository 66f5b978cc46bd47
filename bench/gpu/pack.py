"""Packs vLLM and pagewire's requirements for a GPU machine without a network: python -m bench.gpu.pack COMMAND.

    inventory                        on the GPU machine: print the installed packages as JSON; needs only Python
    plan FOLDER --inventory FILE     with a network: list which packages to fetch, to keep and to leave out
    make FOLDER --inventory FILE     with a network: like plan, then write pieces and manifest.json into FOLDER
    join FOLDER --into PLACE         on the GPU machine, after each copied piece: keep it, unpack complete archives

The archives are unpacked to PLACE/vllm and PLACE/pagewire, each on the PYTHONPATH of its own processes only, because
both require different versions of the same packages. pagewire/ also contains the code generated from protos/. The
project's sources are copied separately. The default inventory is bench/gpu/machine.json.
"""

import argparse
import sys
from pathlib import Path

from bench.gpu.inventory import Inventory
from bench.gpu.pieces import PieceError, join

ASSUMED = Path(__file__).with_name("machine.json")
VLLM = "0.25.1"
"""The newest version of vLLM whose wheel requires torch 2.11.0 with CUDA 13 and accepts transformers 5.17."""
PIECE_MIB = 56
"""A piece and this project's sources (5 MiB) together fit into 64 MiB."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.gpu.pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inventory")
    for name in ("plan", "make"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--inventory", type=Path, default=ASSUMED, help="the output of `inventory`")
        command.add_argument("--vllm", default=VLLM, help=f"vLLM's version (default {VLLM})")
    command.add_argument("--piece-mib", type=_at_least_one, default=PIECE_MIB, help=f"MiB (default {PIECE_MIB})")
    command.add_argument("--whole", action="store_true", help="leave nothing out of vLLM, for GPUs other than Hopper's")
    command = commands.add_parser("join")
    command.add_argument("folder", type=Path)
    command.add_argument("--into", type=Path, required=True, metavar="PLACE")
    return parser.parse_args(arguments)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def make(arguments: argparse.Namespace) -> None:
    """Plan which packages to fetch and, for `make`, write them. Raises PackError if they cannot work together."""
    # `packaging` may be missing on the GPU machine
    from bench.gpu.make import plan, write

    arguments.folder.mkdir(parents=True, exist_ok=True)
    plans = plan(Inventory.read(arguments.inventory), arguments.vllm, arguments.folder)
    for name, planned in plans.items():
        brought = ", ".join(f"{package} {version}" for package, version in planned.versions.items())
        found = ", ".join(f"{package} {version or ''}".strip() for package, version in planned.on_machine.items())
        say(f"{name} is brought: {brought}.\n{name} finds there: {found}.")
        if planned.not_needed:
            say(f"{name} goes without: {', '.join(sorted(planned.not_needed))}.")
    if arguments.command == "make":
        parts = write(plans, arguments.folder, arguments.piece_mib * 2**20, whole=arguments.whole)
        for part in parts:
            say(f"{part.name}: {part.size / 2**20:.0f} MiB in {', '.join(piece.name for piece in part.pieces)}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "inventory":
            say(Inventory.of_this_machine().as_json())
        elif arguments.command == "join":
            lacking = join(arguments.folder, arguments.into)
            for part, names in lacking.items():
                say(f"{part} lacks {', '.join(names)}" if names else f"{part} is in {arguments.into / part}")
            sys.exit(1 if any(lacking.values()) else 0)
        else:
            make(arguments)
    except (PieceError, ValueError, OSError) as error:
        sys.exit(f"bench.gpu.pack: {error}")


if __name__ == "__main__":
    main()
