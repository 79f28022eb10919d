"""Own the reading of settings; nothing else reads arguments, the environment or a configuration file.

Precedence, highest first: command-line flags, environment variables `KVLEASED_*`, the TOML file named by `--config`,
the defaults.
"""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from kvlease._output import written_or_refused
from kvlease._runtime import runtime_directory
from kvleased.config.addresses import without_credentials
from kvleased.config.setting_faults import (
    CONFIG,
    NO_JSON,
    PREFIX,
    Origin,
    complaints,
    flag,
    in_two_cases,
    no_such,
    of_command_line,
    of_tenants,
)
from kvleased.config.setting_kinds import WRITTEN
from kvleased.config.settings import Settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings, CliSettingsSource

_EPILOG: Final = """\
BYTES may have a unit, such as 8GiB. Each flag is also a TOML key and an environment variable: KVLEASED_ and its name
in capitals.

examples:
  kvleased serve                                            CPU memory, sockets of this user, TCP on loopback
  kvleased serve --memory-bytes-max 64GiB --disk-dir /var/lib/kvlease --disk-bytes-max 200GiB
  kvleased serve --device cuda:0 --no-listen-tcp
  kvleased serve --config /etc/kvlease/kvleased.toml        the environment overrides the file, flags override both
"""
_DEFAULT: Final = re.compile(r" \(default( factory)?: [^()]*\)$")
"""The part about the default that is appended to the description of a setting."""
_VALUES: Final = {
    "dir": "DIRECTORY",
    "file": "FILE",
    "seconds": "SECONDS",
    "ms": "MILLISECONDS",
    "port": "PORT",
    "host": "ADDRESS",
    "url": "URL",
    "endpoint": "URL",
    "device": "DEVICE",
    "tenants": "JSON",
}
"""The words for values in the help, by a part of the setting's name; the first part that fits counts."""


def load(argv: Sequence[str]) -> Settings:
    """Resolve flags, environment and file to settings; exit with status 2 if they make no sense."""
    # Imported here, because the control process gets resolved settings and must start quickly.
    from pydantic_settings import (  # noqa: PLC0415
        BaseSettings,
        EnvSettingsSource,
        PydanticBaseSettingsSource,
        SettingsConfigDict,
        SettingsError,
        TomlConfigSettingsSource,
    )

    parser = _parser()
    if twice := in_two_cases(filter(is_setting, os.environ), PREFIX):
        parser.error(twice)
    # The file must be known before the sources are put together.
    config = _config_file(parser, argv)
    _check_tenants(parser, argv)

    origins: dict[Literal["flags", "environment", "file"], PydanticBaseSettingsSource] = {}

    class Loaded(BaseSettings, Settings):
        """The same settings, read from their sources."""

        model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            *_sources: PydanticBaseSettingsSource,
            **_named_sources: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            origins["flags"] = _flags(settings_cls, parser, argv)
            origins["environment"] = EnvSettingsSource(settings_cls)
            if config is not None:
                origins["file"] = file = TomlConfigSettingsSource(settings_cls, config)
                if twice := in_two_cases(file.toml_data):
                    parser.error(f"{config}: {twice}")
            return tuple(origins.values())

    try:
        loaded = Loaded()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        parser.error(f"--config {config}: this is not valid TOML: {error}")
    except SettingsError:
        # Only `tenants` is read as JSON, and the flag by a reader of its own.
        parser.error(f"{flag('tenants')}: {NO_JSON}")
    except ValidationError as error:
        found = [Origin(kind, source(), config or "") for kind, source in origins.items()]
        parser.error(f"\n{parser.prog}: ".join(complaints(error, found)))
    return Settings.model_validate(loaded.model_dump())


def _flags(
    settings_class: "type[BaseSettings]", parser: argparse.ArgumentParser, argv: Sequence[str]
) -> "CliSettingsSource[Any]":
    """Return the source that reads the flags; it adds them to the parser."""
    from pydantic_settings import CliSettingsSource  # noqa: PLC0415 - as above

    return CliSettingsSource(
        settings_class,
        cli_parse_args=list(argv),
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


def unknown_variables() -> dict[str, str]:
    """Return the environment variables that look like settings but are none, each with what to say of it.

    They are ignored rather than refused, because Kubernetes adds such variables for a service named kvleased.
    """
    names = {name: name[len(PREFIX) :].lower() for name in os.environ if is_setting(name)}
    return {
        name: no_such(setting, prefix=PREFIX)
        for name, setting in sorted(names.items())
        if setting != CONFIG and setting not in Settings.model_fields
    }


class _Formatter(argparse.HelpFormatter):
    """Wraps the descriptions of settings, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text is not _EPILOG:
            return super()._fill_text(text, width, indent)
        return text


def _value_of(name: str, field: "FieldInfo") -> str:
    """Return the word for a setting's value in the help, in capitals."""
    if WRITTEN in field.metadata:
        return "BYTES"
    if field.annotation is int and name.startswith("max_"):
        return "N"
    parts = name.split("_")
    known = next((word for part, word in _VALUES.items() if part in parts), "")
    return known or ("N" if field.annotation is int else "TEXT")


def _with_default(text: str, field: "FieldInfo") -> str:
    """Return a setting's help with its default, if it has one; otherwise the description tells what happens."""
    described = _DEFAULT.sub("", text)
    if field.default_factory is runtime_directory:
        return f"{described} (default: {runtime_directory()})"
    return text if field.default not in {None, "", PydanticUndefined} else described


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what is wrong and how to list the settings, without listing them."""

    def format_help(self) -> str:
        """Return the help, with words for values and defaults that people understand."""
        for action in self._actions:
            field = Settings.model_fields.get(action.dest)
            is_choice = str(action.metavar).startswith("{")
            if field is not None and action.metavar is not None and not is_choice:
                action.metavar = _value_of(action.dest, field)
            if field is not None and action.help is not None:
                action.help = _with_default(action.help, field)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Write the help, and say so if it cannot be written; argparse would say nothing."""
        with written_or_refused("kvleased"):
            (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a message; an address in it, such as after a misspelt flag, loses its password."""
        message = without_credentials(of_command_line(message))
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists every setting.\n")


def _parser() -> _Parser:
    """Return the parser of the command line, to which the settings add their flags."""
    parser = _Parser(
        prog="kvleased serve",
        description="Run the KV-cache daemon of this node: a supervisor, the control process and a mover.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; environment and flags override it"
    )
    return parser


def _config_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """Return the file that flags or environment name; exit with status 2 if it does not exist."""
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--config")
    known, _ = scout.parse_known_args(argv)
    variable = f"{PREFIX}{CONFIG}".upper()
    named = (value for name, value in os.environ.items() if name.upper() == variable)
    config: str | None = known.config
    if config is None:
        # An empty variable stands for none, as an empty flag does not.
        config = next(named, None) or None
    if config is not None and not Path(config).is_file():
        is_there = Path(config).exists()
        parser.error(
            f"--config {config}: {'this is not a file' if is_there else 'there is no such file'}"
        )
    return config


def _check_tenants(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Exit with status 2 if flags or environment give tenants as anything but an object: it could pass for none."""
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The parser itself says that a value is missing.
    scout.add_argument("--tenants", action="append", nargs="?", const="{}", default=[])
    known, _ = scout.parse_known_args(argv)
    written = [(flag("tenants"), text) for text in known.tenants]
    written += [one for one in os.environ.items() if one[0].upper() == f"{PREFIX}TENANTS"]
    for name, text in written:
        if wrong := of_tenants(text):
            parser.error(f"{name}: {wrong}")


def is_setting(variable: str) -> bool:
    """Tell whether an environment variable is a setting, or looks like one."""
    return variable.upper().startswith(PREFIX)
