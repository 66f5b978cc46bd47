"""What README, docs/, deploy/ and CONTRIBUTING.md name is there, and what there is to set is in docs/flags.md."""

import enum
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import pytest
from fuzz import parse_arguments as fuzz_arguments
from http_tables import PAGE, call_of, written
from persons import persons_in

from bench.__main__ import BENCHES
from bench.__main__ import main as bench
from pagewire.v1.inference_service_pb2 import SamplingParams
from pagewire_client.cli.parser import parse_arguments as client_arguments
from pagewire_client.cli.request_options import SAMPLING
from pagewire_command import completion, doctor
from pagewire_command.commands import COMMANDS as PAGEWIRE
from pagewire_common.calls.request_limits import MAX_FIELDS
from pagewire_common.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    NUMBERS,
    PARAMETERS,
)
from pagewire_common.serving.server import OPTIONS
from pagewire_common.settings import ServiceSettings
from scheduler_service.engine.calls.admission import MAX_SIDE_CALLS
from scheduler_service.fit import parse_arguments as fit_arguments
from scheduler_service.frontend.calls.text_calls import IN_FLIGHT, MAX_TEXTS
from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted
from scheduler_service.frontend.chat.families import _ROWS
from scheduler_service.frontend.chat.parser import ChatParser
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.checking.checks import MAX_MESSAGES
from scheduler_service.frontend.checking.prompt import MAX_TOKENIZE
from scheduler_service.frontend.http.routes import ROUTES
from scheduler_service.frontend.link.engine_link import BYTES_PER_TOKEN
from scheduler_service.frontend.rendering.bounded_json import MAX_DEPTH, MAX_VALUES
from scheduler_service.frontend.rendering.chat_values import MAX_TOOLS
from scheduler_service.operations.admin_servicer import MAX_WATCHES
from scheduler_service.replay import parse_arguments as replay_arguments
from scheduler_service.settings import SchedulerSettings
from scheduler_service.simulate import parse_arguments as simulate_arguments
from worker_service.settings import WorkerSettings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = sorted(ROOT.glob("bench/results/*.md"))
PAGES = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "deploy/README.md", ROOT / "bench/README.md"),
    *(*ROOT.glob("docs/*.md"), *RESULTS),
]
SITE = sorted(ROOT.glob("docs/*/*.md"))
"""Pages in the navigation of the site, to which the README links by its first page."""
SERVICES: tuple[type[ServiceSettings], ...] = (SchedulerSettings, WorkerSettings)
COMMANDS = {
    "client": [
        (client_arguments, [name])
        for name in (
            *("generate", "chat", "embed", "score", "transcribe", "serve", "new-key", "watch", "requests", "drain"),
            *("undrain", "adapters", "load-adapter", "unload-adapter", "reset-prefix-cache"),
        )
    ],
    "simulate": [(simulate_arguments, [])],
    "replay": [(replay_arguments, [])],
    "fit": [(fit_arguments, [])],
    "doctor": [(doctor.make_parser("doctor").parse_args, [])],
}


def bench_arguments(arguments: list[str]) -> None:
    with patch.object(sys, "argv", ["bench", *arguments]):
        bench()


PROGRAMS = [
    (fuzz_arguments, []),
    *((bench_arguments, [name]) for name in BENCHES),
    *((bench_arguments, ["pack", command]) for command in ("make", "join")),
]
OTHERS_PROGRAMS = ("curl", "docker", "docker-compose", "git", "grpcurl", "kubectl", "pip", "uvx")

each_page = pytest.mark.parametrize("page", [*PAGES, *SITE], ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its code blocks, in which nothing is a link or a heading."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What links may name behind a #, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files of a page's links, and what stands behind the #."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield ((page.parent / file).resolve() if file else page), anchor


def code(page: Path) -> Iterator[str]:
    """Everything in a page that stands as code: lines of blocks, and spans within a paragraph."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", prose(page))


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def options(
    capsys: pytest.CaptureFixture[str], commands: Sequence[tuple[Callable[..., object], list[str]]]
) -> set[str]:
    """The flags of commands, as their --help has them."""
    found: set[str] = set()
    for parse, arguments in commands:
        with pytest.raises(SystemExit):
            parse([*arguments, "--help"])
        found |= set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    return found


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """The table below a heading of docs/flags.md: default and meaning, by flag."""
    section = (ROOT / "docs/flags.md").read_text().split(f"\n## {heading}\n")[1].split("\n#")[0]
    found = re.findall(r"^\| `(--[a-z-]+)[^`]*` \| *(.*?) *\| (.*) \|$", section, re.MULTILINE)
    assert len({name for name, _, _ in found}) == len(found)
    return {name: (default, meaning) for name, default, meaning in found}


def in_words(default: Any) -> str:
    """A default as the table of flags has it."""
    match default:
        case None | []:
            return "–"
        case bool():
            return "`on`" if default else "`off`"
        case float():
            return f"`{default:g}`"
        case list():
            return f"`{','.join(default)}`"
        case enum.Enum():
            return f"`{default.value}`"
    return f"`{default}`"


def choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [member.value for member in annotation] if isinstance(annotation, enum.EnumMeta) else []


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to #{anchor} of {file.name}"


def test_the_readme_links_to_every_page() -> None:
    assert set(PAGES) - {README, *RESULTS} <= {file for file, _ in links(README)}


def test_the_page_of_performance_links_to_every_page_of_results() -> None:
    assert set(RESULTS) <= {file for file, _ in links(ROOT / "docs/performance.md")}


@each_page
def test_every_flag_that_a_page_names_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {flag(name) for settings in SERVICES for name in settings.model_fields}
    known |= {flag(f"no_{name}") for settings in SERVICES for name, field in settings.model_fields.items()
              if field.annotation is bool}  # fmt: skip
    if page.name == "flags.md":
        known |= {flag(old) for settings in SERVICES for old in settings.old_names}
    known |= {"--help", "--no-", "--version"}.union(
        *(options(capsys, commands) for commands in (*COMMANDS.values(), PROGRAMS))
    )
    for text in code(page):
        own = re.sub(r"^(\w+=\S+ )*", "", text.strip())  # behind variables of its environment
        if own.split(" ")[0] not in OTHERS_PROGRAMS:
            assert flags_in(own) <= known, text


@each_page
def test_every_variable_that_a_page_names_is_a_setting(page: Path) -> None:
    known = {name.upper() for settings in SERVICES for name in settings.model_fields}
    if page.name == "flags.md":
        known |= {old.upper() for settings in SERVICES for old in settings.old_names}
    known |= {"TARGET", "ADMIN_TARGET", "HTTP_HOST", "HTTP_PORT", "CLIENT_TLS", "CLIENT_API_KEY"}
    assert set(re.findall(r"\bPAGEWIRE_([A-Z_]+)", page.read_text())) <= known


@pytest.mark.parametrize(
    "number",
    [
        *(MAX_N, MAX_STOP_STRINGS, MAX_STOP_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_MESSAGES, MAX_TOKENIZE),
        *(MAX_TEXTS, IN_FLIGHT, MAX_TOOLS, MAX_VALUES, MAX_DEPTH),
        *(MAX_FIELDS, BYTES_PER_TOKEN, MAX_SIDE_CALLS, MAX_WATCHES, dict(OPTIONS)["grpc.max_concurrent_streams"]),
    ],
)
def test_the_page_of_limits_has_the_numbers_of_the_code(number: int) -> None:
    assert re.search(rf"(?<!\d)(?<!\d,){number:,}(?!,?\d)", (ROOT / "docs/limits.md").read_text())


def test_the_page_of_sampling_parameters_has_the_rows_of_their_table() -> None:
    """A row that differs is printed as it should be."""
    assert set(PARAMETERS) == set(SamplingParams.DESCRIPTOR.fields_by_name)
    expected: dict[str, list[str]] = {"Numbers": [], "Others": []}
    for name, one in PARAMETERS.items():
        cells = [f"`{name}`", f"`{flag(name)}`" if name in SAMPLING else "–", one.values, one.default]
        if name not in NUMBERS:
            cells += [", ".join(one.readers), "yes" if one.with_beams else "no"]
        expected["Numbers" if name in NUMBERS else "Others"].append(f"| {' | '.join(cells)} |")
    for heading, wanted in expected.items():
        section = (ROOT / "docs/sampling.md").read_text().split(f"\n## {heading}\n")[1].split("\n#")[0]
        assert re.findall(r"^\| `.*$", section, re.MULTILINE) == wanted


def test_the_page_of_http_has_the_tables_of_the_code() -> None:
    """`python tests/http_tables.py` writes them."""
    assert PAGE.read_text() == written(PAGE.read_text())


def test_the_page_of_http_has_every_route() -> None:
    section = PAGE.read_text().split("\n## Routes\n")[1].split("\n#")[0]
    named = set(re.findall(r"`(/\S+)`", " ".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
    others = {"/health", "/liveness", "/ping", "/readiness", "/v1/models", "/v1/models/NAME"}
    others |= {"/v1/responses/ID", "/v1/responses/ID/input_items"}
    assert named == {route.partition(" ")[2] for route in ROUTES} | others


def test_every_example_of_a_call_is_read_as_a_call() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}})
    for _, syntax in _ROWS:
        parser = ChatParser(syntax, "", [tool])
        started, *others = [*parser.feed(call_of(syntax)), *parser.finish()]
        assert isinstance(started, CallStarted), syntax.family
        assert others == [CallArguments(0, '{"a": "b"}'), CallEnded(0)]


@each_page
def test_every_command_that_a_page_names_is_there(page: Path) -> None:
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = [target for rule in rules for target in rule.split()]
    for text in code(page):
        for module in re.findall(r"python -m ([a-z_.]+)", text):
            assert find_spec(module) is not None, text
        for name in re.findall(r"(?<!-n )\bpagewire ([a-z][a-z-]+)", text):
            assert name in PAGEWIRE, text
        for name in re.findall(r"python -m bench ([a-z]\w*)", text):
            assert name in BENCHES, text
        for target in re.findall(r"(?:^|[ ;&])make ([a-z-]+)", text):
            assert target in targets, text


def test_every_test_that_runs_on_a_gpu_exists() -> None:
    command = ["make", "--dry-run", "test-gpu"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = re.findall(r"tests/\S+\.py", printed)
    assert len(tests) > 20
    assert [test for test in tests if not (ROOT / test).is_file()] == []


def test_every_setting_is_in_the_table_of_flags_with_its_default_and_its_choices() -> None:
    of_both = rows("Both services")
    assert set(of_both) == {flag(name) for name in {*ServiceSettings.model_fields, "listen"}}
    for heading, settings in (("The scheduler", SchedulerSettings), ("A worker", WorkerSettings)):
        assert set(rows(heading)) == {flag(name) for name in settings.model_fields} - set(of_both)
        for name, (default, meaning) in (of_both | rows(heading)).items():
            field = settings.model_fields[name.removeprefix("--").replace("-", "_")]
            assert in_words(field.default) in (default or meaning), name
            for choice in choices(field.annotation):
                assert f"`{choice}`" in default + meaning, name


def test_every_old_name_is_in_the_table_of_old_names_with_its_new_name() -> None:
    section = (ROOT / "docs/flags.md").read_text().split("\n## Old names\n")[1].split("\n#")[0]
    table = [line.split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    for settings in SERVICES:
        for old, new in settings.old_names.items():
            assert any(flag(old) in flags_in(row[0]) and flag(new) in flags_in(row[1]) for row in table), old
            assert old not in settings.model_fields


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_the_page_of_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = re.findall(r"\n## Commands\n(.*)", (ROOT / "docs/flags.md").read_text(), re.DOTALL)
    others = tuple(f"| `pagewire {name}" for name in COMMANDS if name != "client")
    described = [row for row in table.splitlines() if row.startswith(f"| `pagewire {command}")]
    if command == "client":
        described = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith(others)]
        described += re.findall(r"^\| `\w+` \| (`--.*?`)", (ROOT / "docs/sampling.md").read_text(), re.MULTILINE)
    assert flags_in("\n".join(described)) == options(capsys, COMMANDS[command])


def test_the_map_names_files_and_folders_that_are_there() -> None:
    names = [text for text in code(ROOT / "CONTRIBUTING.md") if re.fullmatch(r"[\w./-]+(/|\.\w+)", text)]
    assert len(names) > 30
    for name in names:
        path = ROOT / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name


@each_page
def test_requests_and_workers_are_no_persons(page: Path) -> None:
    assert persons_in(page.read_text()) == []


def test_contracts_and_help_speak_of_no_persons(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [file.read_text() for file in ROOT.glob("protos/**/*.proto")]
    texts += [field.description or "" for settings in SERVICES for field in settings.model_fields.values()]
    for parse, arguments in (command for commands in COMMANDS.values() for command in commands):
        with pytest.raises(SystemExit):
            parse([*arguments, "--help"])
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert persons_in(text) == []


def test_every_command_has_a_parser_whose_flags_a_shell_completes() -> None:
    (commands,) = (action for action in completion.every_parser()._actions if isinstance(action.choices, dict))
    assert set(commands.choices) == set(PAGEWIRE)
    assert "--quantization" in commands.choices["worker"].format_help()
