"""The pages of docs/reference, made from the code: `python tests/reference_tables.py` writes them.

tests/test_reference.py compares them.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from http_tables import status_table
from prometheus_client.core import Metric

from pagewire.v1 import admin_service_pb2 as admin
from pagewire_common.settings import ServiceSettings
from scheduler_service.frontend.http.errors import http_status
from scheduler_service.operations.metrics import SchedulerMetrics
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import STEP_BOUNDS, Histogram, RequestCounts
from worker_service.serving.servicer import WorkerStatistics, families
from worker_service.settings import WorkerSettings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Made by tests/reference_tables.py. -->\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """A text in one cell. Angle brackets outside code would be HTML."""
    text = " ".join(text.split()).replace("|", "\\|")
    return "".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(re.split(r"(`[^`]*`)", text)))


# ---- settings


def settings_page() -> str:
    parts = [
        MADE,
        "# Settings\n",
        "All settings of both services with their variables and defaults, in the words of `--help`. "
        "[Flags](../flags.md) describes them at more length.\n",
    ]
    common = set(ServiceSettings.model_fields)
    for heading, settings, names in (
        ("Both services", ServiceSettings, common),
        ("The scheduler", SchedulerSettings, SchedulerSettings.model_fields.keys() - common),
        ("A worker", WorkerSettings, WorkerSettings.model_fields.keys() - common),
    ):
        rows = [
            [f"`--{name.replace('_', '-')}`", f"`PAGEWIRE_{name.upper()}`", shown(field.default),
             code_flags(field.description or "")]
            for name, field in settings.model_fields.items() if name in names
        ]  # fmt: skip
        parts += [f"## {heading}\n", table(["flag", "variable", "default", "meaning"], rows)]
    return "\n".join(parts)


def shown(default: Any) -> str:
    match default:
        case None | [] | () | "":
            return "–"
        case bool():
            return "`on`" if default else "`off`"
        case float():
            return f"`{default:g}`"
    value = getattr(default, "value", default)
    return f"`{','.join(value) if isinstance(value, list) else value}`"


def code_flags(text: str) -> str:
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*[a-z])", r"`\1`", text)


# ---- metrics


def metrics_page() -> str:
    parts = [
        MADE,
        "# Metrics by name\n",
        "All metrics that the services publish, with the help texts of the code. "
        "[Metrics](../metrics.md) describes them at more length.\n",
    ]
    for heading, found in (("The scheduler", scheduler_families()), ("A worker", worker_families())):
        rows = [
            [f"`{one.name}{'_total' if one.type == 'counter' else ''}`", one.type,
             ", ".join(f"`{label}`" for label in labels_of(one)), one.documentation]
            for one in sorted(found, key=lambda one: one.name)
        ]  # fmt: skip
        parts += [f"## {heading}\n", table(["metric", "type", "labels", "meaning"], rows)]
    return "\n".join(parts)


def labels_of(family: Metric) -> list[str]:
    return [label for label in cast(Any, family)._labelnames if label != "model_name"]


def scheduler_families() -> Iterator[Metric]:
    """The families of a scheduler with one worker and one tenant."""
    client = SimpleNamespace(address="")
    blocks = SimpleNamespace(block_size=16, device=SimpleNamespace(num_blocks=1))
    scheduler = SimpleNamespace(blocks=blocks, config=SimpleNamespace(max_loras=1))
    fetched = SimpleNamespace(num_adapters=0, num_bytes=0, seconds=0)
    worker = SimpleNamespace(
        client=client, scheduler=scheduler, step_tokens=Histogram(STEP_BOUNDS), fetch_counts=fetched
    )
    counted = SimpleNamespace(num_requests={}, num_prompt_tokens={}, num_output_tokens={})
    engine = SimpleNamespace(
        workers=SimpleNamespace(all=[worker]),
        adapters=SimpleNamespace(catalogue=SimpleNamespace(are_served=True), counts=counted),
        requests=SimpleNamespace(in_flight={}),
    )
    metrics = SchedulerMetrics(cast(Any, SimpleNamespace(engine=engine)), str, vllm_names=False)
    state = admin.ClusterState(workers=[admin.WorkerState(num_device_blocks=1, proposer="ngram")])
    counts = RequestCounts()
    yield from metrics._like_vllm("pagewire_", "worker", state, counts, {}, [({"tenant": ""}, counts)])
    yield from metrics._own(state, cast(Any, SimpleNamespace(tenants={"": counts})))


def worker_families() -> Iterator[Metric]:
    return families(
        WorkerStatistics(), num_sequences=0, num_device_blocks=0, num_host_blocks=0, draining=False
    )  # fmt: skip


# ---- errors

MEANINGS = {
    "INVALID_ARGUMENT": ("a field is unknown or out of range", "change the request"),
    "FAILED_PRECONDITION": ("the stream to resume belongs to another model or configuration", "begin anew"),
    "ALREADY_EXISTS": ("the tenant has a request with this id in flight", "choose another id"),
    "UNAUTHENTICATED": ("the key is missing or unknown", "send a key"),
    "PERMISSION_DENIED": ("the key may not do this", "ask the operator"),
    "NOT_FOUND": ("the model, the adapter or the request does not exist", "correct the name"),
    "RESOURCE_EXHAUSTED": ("a queue, a quota or a memory limit is full, or the stream was not read",
                           "try again later, with fewer requests"),
    "INTERNAL": ("a fault of the service, or a request after whose steps workers were lost", "read the log"),
    "UNIMPLEMENTED": ("the model or the server lacks the feature that the message names", "use another model"),
    "ABORTED": ("another call resumed the stream, or `Abort` ended it", "nothing"),
    "DEADLINE_EXCEEDED": ("the deadline of the call has passed", "allow more time"),
    "CANCELLED": ("the client closed the call", "nothing"),
    "UNAVAILABLE": ("no worker takes requests, or the server stops", "resume, or try again: the Python client does"),
}  # fmt: skip
"""When a call ends with each gRPC status, and what a client does then."""


def errors_page() -> str:
    used = statuses_in_code()
    assert used == set(MEANINGS), used ^ set(MEANINGS)
    rows = [[f"`{name}`", str(http_status(name)), *MEANINGS[name]] for name in MEANINGS]
    return "\n".join(
        [
            MADE,
            "# Errors\n",
            "Every call ends with one status. The message names the field, the value and the limit.\n",
            "## Statuses of gRPC\n",
            "The second column is the status of the same error over HTTP. [Limits](../limits.md) lists each limit.\n",
            table(["status", "HTTP", "when", "what a client does"], rows),
            "## Statuses of HTTP\n",
            status_table(),
        ]
    )


def statuses_in_code() -> set[str]:
    """Statuses that the services name, except OK and the UNKNOWN of a proxy or a library."""
    found: set[str] = set()
    for folder in ("scheduler_service", "worker_service", "pagewire_common"):
        for file in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r"(?:StatusCode|_Code)\.([A-Z_]+)", file.read_text()))
    return (found & set(grpc.StatusCode.__members__)) - {"OK", "UNKNOWN"}


# ---- protos

PUBLIC = ("inference_service", "admin_service", "worker_service", "scheduler_output")


def protos_page() -> str:
    parts = [
        MADE,
        "# Protos\n",
        "The contracts, with their comments. `buf` and `protoc` read the files in `protos/pagewire/v1`; the server's "
        "reflection serves the same.\n",
    ]
    for file in described():
        comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
        name = Path(file.name).name
        parts.append(f"## {name}\n\n[{name}](../../protos/{file.name})\n")
        for number, service in enumerate(file.service):
            rows = [
                [f"`{rpc.name}`", f"{kind(rpc.client_streaming, rpc.input_type)}",
                 kind(rpc.server_streaming, rpc.output_type), comments.get((6, number, 2, index), "")]
                for index, rpc in enumerate(service.method)
            ]  # fmt: skip
            parts += [f"### {service.name}\n", paragraphs(comments.get((6, number), "")), rpc_table(rows)]
        for number, message in enumerate(file.message_type):
            parts += message_parts(message, (4, number), comments)
        for number, enum in enumerate(file.enum_type):
            rows = [
                [f"`{v.name}`", str(v.number), comments.get((5, number, 2, i), "")] for i, v in enumerate(enum.value)
            ]
            parts += [f"### {enum.name}\n", paragraphs(comments.get((5, number), "")),
                      table(["value", "number", "meaning"], rows)]  # fmt: skip
    return "\n".join(part for part in parts if part)


def rpc_table(rows: list[list[str]]) -> str:
    return table(["call", "request", "response", "meaning"], rows)


def message_parts(message: DescriptorProto, path: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> list[str]:
    rows = [
        [f"`{field.name}`", field_kind(field), str(field.number), comments.get((*path, 2, index), "")]
        for index, field in enumerate(message.field)
    ]
    fields = table(["field", "type", "number", "meaning"], rows) if rows else ""
    return [f"### {message.name}\n", paragraphs(comments.get(path, "")), fields]


def described() -> list[FileDescriptorProto]:
    """The contracts with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        files = [f"pagewire/v1/{name}.proto" for name in PUBLIC]
        protos = ROOT / "protos"
        arguments = ["protoc", f"-I{protos}", "--include_source_info", f"--descriptor_set_out={out}", *files]
        if status := protoc.main(arguments):
            raise RuntimeError(f"protoc ended with status {status}")
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def kind(is_stream: bool, name: str) -> str:
    return f"{'stream of ' if is_stream else ''}`{name.rpartition('.')[2]}`"


def field_kind(field: FieldDescriptorProto) -> str:
    name = field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' if repeated else 'optional ' if field.proto3_optional else ''}`{name}`"


def paragraphs(comment: str) -> str:
    """A comment as Markdown. A part with a column of names stays as it is."""
    parts = []
    for part in re.split(r"\n\s*\n", comment.rstrip()):
        lines = [line[1:] if line.startswith(" ") else line for line in part.splitlines()]
        is_table = any(re.match(r" {2,}\S|\S+ {2,}\S", line) for line in lines)
        parts.append("```text\n" + "\n".join(lines) + "\n```\n" if is_table else cell(part) + "\n")
    return "\n".join(parts) if comment.strip() else ""


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "metrics": metrics_page,
    "errors": errors_page,
    "protos": protos_page,
}


def main() -> int:
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
