"""Configuration by flags and PAGEWIRE_ environment variables, through one typed class a service.

Flags win over the environment, the environment over defaults. An empty variable counts as one that is not set, but for
those that close a service: one of them that is empty by mistake would open it. A bad value ends the process with one
sentence.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.telemetry.tracing import check_endpoint
from pagewire_common.version import version_of


def parse_address(address: str) -> str:
    """Check that an address is HOST:PORT; raises ValueError otherwise. Port 0 lets the system choose."""
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdigit() and int(port) < 65536):
        raise ValueError(f"'{address}' is not HOST:PORT")
    return address


Address = Annotated[str, AfterValidator(parse_address)]


class ServiceSettings(BaseSettings):
    """The settings that both services have."""

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

    model: str = Field(
        "default",
        description="'default', a Hugging Face directory, a GGUF file, or a hub name; the same for both services",
    )
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
    mutual_tls: bool = Field(False, description="with --tls: callers need a certificate that ca.crt vouches for")
    grace: float = Field(30.0, ge=0, description="seconds that work in flight is given after SIGTERM")

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
"""Settings that close a service."""


def load_settings(cls: type[Settings], program: str, arguments: Sequence[str] | None = None) -> Settings:
    """Read the settings of a service. A bad setting ends the process with a sentence on stderr; --version prints the
    version and ends it with status 0."""
    cls.model_config["cli_prog_name"] = program
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in given:
        sys.stdout.write(f"{version_of(program)}\n")
        sys.exit(0)
    for variable in (f"PAGEWIRE_{name.upper()}" for name in cls.model_fields if _LOCKS.fullmatch(name)):
        if os.environ.get(variable) == "":
            sys.exit(f"{program}: {variable} is empty, which would leave the service open; unset it or fill it")
    try:
        return CliApp.run(cls, given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]).replace("_", "-")
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        sys.exit(f"{program}: --{field}: {first['msg'].removeprefix('Value error, ')}{value}")
    except Exception as error:  # the settings library raises its own types for flags it cannot read
        sys.exit(f"{program}: {error}")
