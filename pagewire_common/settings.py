"""Settings from flags, else PAGEWIRE_ environment variables: the fields of one typed class for each service.

An empty variable counts as unset, but is refused if it restricts access, because it would open the service.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import structlog
from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pagewire_common import old_names
from pagewire_common.connection.address import join_address, parse_address, split_address
from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.telemetry.tracing import check_endpoint
from pagewire_common.version import version_of

log = structlog.get_logger()

Address = Annotated[str, AfterValidator(parse_address)]


class _Environment(EnvSettingsSource):
    """Reads PAGEWIRE_ variables, including variables with old names."""

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        settings: type[ServiceSettings] = self.settings_cls  # type: ignore[assignment]
        found |= settings.translate(old_names.from_environment(settings.old_names))
        # Kubernetes sets PAGEWIRE_PORT to tcp://… in pods if a Service has the name "pagewire".
        if str(found.get("port", "")).startswith("tcp://"):
            del found["port"]
        if "listen" in self.current_state:  # flags override variables, and --listen sets both host and port
            found.pop("host", None)
            found.pop("port", None)
        return found


class ServiceSettings(BaseSettings):
    old_names: ClassVar[Mapping[str, str]] = {}
    """The new name of each renamed setting, by its old name."""

    several: ClassVar[frozenset[str]] = frozenset()
    """Settings whose flags accept several words, such as `--lora-modules a=A b=B`."""

    _lines: list[str] = PrivateAttr(default_factory=list)

    model_config = SettingsConfigDict(
        env_prefix="PAGEWIRE_",
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    host: str | None = Field(None, min_length=1, description="the HOST of --listen, without its port")
    port: int | None = Field(None, ge=0, lt=65536, description="the PORT of --listen, without its host")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log to write")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else json")
    metrics_listen: Address | None = Field(
        None, description="HOST:PORT to serve Prometheus metrics on, at /metrics; by default they are not served"
    )
    otlp_traces_endpoint: Annotated[str | None, AfterValidator(check_endpoint)] = Field(
        None,
        description="http://HOST:PORT of an OpenTelemetry collector that spans of requests are sent to, by OTLP over "
        "gRPC; https:// for TLS; by default there are none",
    )
    tls: Path | None = Field(
        None,
        description="folder of tls.crt, tls.key and ca.crt, as cert-manager names them: serve by TLS, metrics as well; "
        "by default in plain text",
    )
    mutual_tls: bool = Field(False, description="with --tls: clients need a certificate that ca.crt has signed")
    grace: float = Field(30.0, ge=0, description="seconds for work in flight after SIGTERM")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # this source ignores old names
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls), dotenv_settings, file_secret_settings

    @classmethod
    def translate(cls, values: Mapping[str, str]) -> dict[str, str]:
        """Translate old settings to new ones. Raises ValueError if an old value has no equivalent."""
        return {cls.old_names[old]: value for old, value in values.items()}

    def log_old_names(self) -> None:
        for line in self._lines:
            log.warning(line)

    @field_validator("listen", check_fields=False)
    @classmethod
    def _with_host_and_port(cls, listen: str, info: ValidationInfo) -> str:
        host, port = split_address(listen)
        given_host, given_port = info.data.get("host"), info.data.get("port")
        return join_address(given_host or host, port if given_port is None else given_port)

    @field_validator("mutual_tls")
    @classmethod
    def _needs_a_folder(cls, mutual_tls: bool, info: ValidationInfo) -> bool:
        if mutual_tls and info.data.get("tls") is None:
            raise ValueError("it needs --tls, the folder of certificates")
        return mutual_tls

    def security(self, identity: str = "") -> Security:
        """TLS of this service's ports. Raises StartError if the folder cannot be used."""
        return Security(TlsFolder(self.tls) if self.tls is not None else None, self.mutual_tls, identity)


Settings = TypeVar("Settings", bound=ServiceSettings)

_LOCKS = re.compile("(.*_)?(tls|identity|keys?)")
"""Settings that restrict access to a service."""


def load_settings(cls: type[Settings], program: str, arguments: Sequence[str] | None = None) -> Settings:
    """Read a service's settings. A first word that is no flag is the model. A bad setting ends the process with a
    sentence on stderr."""
    cls.model_config["cli_prog_name"] = program
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and not given[0].startswith("-"):
        given.insert(0, "--model")
    if "--version" in given:
        sys.stdout.write(f"{version_of(program)}\n")
        sys.exit(0)
    for variable in (f"PAGEWIRE_{name.upper()}" for name in cls.model_fields if _LOCKS.fullmatch(name)):
        if os.environ.get(variable) == "":
            sys.exit(f"{program}: {variable} is empty, which would leave the service open; unset it or fill it")
    try:
        given, lines = old_names.translated(given, cls.old_names, cls.translate)
        names = {word.partition("=")[0] for word in given}
        for part in ("--host", "--port"):
            if {part, "--listen"} <= names:
                raise ValueError(f"{part}: it is a part of --listen; give one of them alone")
        settings = CliApp.run(cls, list(_one_word_each(given, cls.several)))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]).replace("_", "-")
        value = "" if first["type"] == "missing" or field.endswith("-secret") else f" (got {first['input']!r})"
        sys.exit(f"{program}: --{field}: {first['msg'].removeprefix('Value error, ')}{value}")
    except Exception as error:  # for flags that it cannot parse, the settings library raises its own errors
        sys.exit(f"{program}: {error}")
    settings._lines = lines
    return settings


def _one_word_each(arguments: Sequence[str], several: frozenset[str]) -> Iterator[str]:
    """Repeat a flag that accepts several words before each word."""
    flags = {old_names.flag(name) for name in several}
    current = ""
    for word in arguments:
        if word in flags:
            current = word
        elif current and not word.startswith("--"):
            yield f"{current}={word}"
        else:
            current = ""
            yield word
