"""The commands of `pagewire`. A command's module is imported when it runs: torch and grpc take seconds."""

from typing import NamedTuple

CLIENT = "pagewire_client.__main__"


class Command(NamedTuple):
    module: str
    """Module with `main(program)`, which reads sys.argv."""
    help: str


COMMANDS = {
    "serve": Command(CLIENT, "start both services on this machine: gRPC, and the HTTP APIs"),
    "scheduler": Command("scheduler_service.__main__", "run a scheduler"),
    "worker": Command("worker_service.__main__", "run a worker"),
    "run": Command(CLIENT, "talk with a model; also chat"),
    "chat": Command(CLIENT, "talk with a model; also run"),
    "generate": Command(CLIENT, "continue a prompt"),
    "embed": Command(CLIENT, "compute vectors of texts"),
    "score": Command(CLIENT, "score documents for a query"),
    "transcribe": Command(CLIENT, "transcribe a sound file"),
    "watch": Command(CLIENT, "show queues, workers, blocks and rates, as they change"),
    "requests": Command(CLIENT, "list the requests that ended last"),
    "drain": Command(CLIENT, "give a worker no new work"),
    "undrain": Command(CLIENT, "give a worker work again"),
    "reset-prefix-cache": Command(CLIENT, "empty the prefix cache"),
    "adapters": Command(CLIENT, "list the adapters that requests can name"),
    "load-adapter": Command(CLIENT, "load an adapter"),
    "unload-adapter": Command(CLIENT, "unload an adapter"),
    "new-key": Command(CLIENT, "create an API key"),
    "replay": Command("scheduler_service.replay", "run a scheduler again from a recording"),
    "fit": Command("scheduler_service.fit", "fit a cost model to a recording"),
    "simulate": Command("scheduler_service.simulate", "plan capacity without a GPU"),
    "bench": Command("bench.__main__", "run a benchmark"),
    "doctor": Command("pagewire_command.doctor", "say what this machine has, and which models fit"),
    "completion": Command("pagewire_command.completion", "print a shell's completion of these commands"),
}
