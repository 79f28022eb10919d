"""Own the messages about wrong settings: each names the setting as it was written, and says what to write instead.

`sources` reads the settings, and `settings` defines them.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from kvlease.ids import TENANT_CHARACTERS_MAX
from kvleased.config.setting_kinds import WRITTEN
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

PREFIX: Final = "KVLEASED_"
"""The beginning of the environment variables that are settings."""
CONFIG: Final = "config"
"""What names the file of settings; a flag or a variable, but no setting."""
NO_JSON: Final = 'this is not JSON such as {"chat": {"min_percent": 20}}'
_SHOWN_MAX: Final = 40
"""Most characters of a wrong value that a message repeats."""
_KEY: Final = "[key]"
"""How pydantic marks that a key is wrong and not its value."""
_UNKNOWN: Final = "unrecognized arguments: "
_NEEDLESS: Final = re.compile("argument (--[a-z-]+)/(--no-[a-z-]+): ignored explicit argument")
_MISSING: Final = re.compile("argument (--[a-z-]+): expected one argument")
"""Messages of argparse about wrong command lines."""
_OF_SEVERAL: Final = re.compile("|".join(sorted(Settings.model_fields, key=len, reverse=True)))


@dataclass(frozen=True, slots=True)
class Origin:
    """One of the places where settings are read from, and the values there."""

    kind: Literal["flags", "environment", "file"]
    values: Mapping[str, Any]
    file: str = ""
    """The path, if the place is a file."""

    def has(self, path: Sequence[int | str]) -> bool:
        """Tell whether the place has a setting, or a part of one."""
        inner: object = self.values
        for part in path:
            if not isinstance(inner, Mapping) or part not in inner:
                return False
            inner = inner[part]
        return True

    def spelt(self, setting: str) -> str:
        """Return the name of a setting as it is written in this place."""
        if self.kind == "flags":
            return flag(setting)
        if self.kind == "file":
            return setting
        wanted = f"{PREFIX}{setting}".upper()
        return next((name for name in os.environ if name.upper() == wanted), wanted)

    def where(self, path: Sequence[int | str]) -> str:
        """Return where to look: the setting in this place, and the part of it."""
        parts = [_printable(str(part)) or "''" for part in path if part != _KEY]
        if self.kind == "file":
            return f"{self.file}: {'.'.join(parts)}"
        inner = f": {'.'.join(parts[1:])}" if parts[1:] else ""
        return f"{self.spelt(parts[0])}{inner}"


def flag(setting: str) -> str:
    """Return the flag of a setting."""
    return f"--{setting.replace('_', '-')}"


def complaints(error: "ValidationError", origins: Sequence[Origin]) -> list[str]:
    """Return a sentence for each wrong setting; `origins` have the highest precedence first."""
    return list(dict.fromkeys(_complaint(one, origins) for one in error.errors()))


def no_such(setting: str, prefix: str = "") -> str:
    """Say that there is no such setting, and which one was perhaps meant."""
    table, _, name = setting.rpartition(".")
    names = list(TenantSettings.model_fields if table else Settings.model_fields)
    if prefix:
        names.append(CONFIG)
    found = difflib.get_close_matches(name, names, n=1)
    if not found:
        return "there is no such setting"
    meant = f"{prefix}{found[0].upper()}" if prefix else found[0]
    return f"there is no such setting; did you mean {meant}?"


def in_two_cases(names: Iterable[str], prefix: str = "") -> str:
    """Say which setting a place has twice, once in capitals, as capitals do not count; empty if there is none."""
    first: dict[str, str] = {}
    for name in names:
        setting = name.lower().removeprefix(prefix.lower())
        is_known = setting in Settings.model_fields or (prefix and setting == CONFIG)
        if is_known and first.setdefault(setting, name) != name:
            return f"{first[setting]} and {name} are the same setting; write it once"
    return ""


def of_tenants(written: str) -> str:
    """Say what is wrong with a text that is not an object in JSON; empty if it is one."""
    twice: list[str] = []

    def told_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    try:
        value: object = json.loads(written, object_pairs_hook=told_once)
    except ValueError:
        return NO_JSON
    if twice:
        return f"{json.dumps(twice[0])} is there twice; write it once"
    if isinstance(value, dict):
        return ""
    return f"it is {_shown(value)}; write {_wanted_of_tenants(['tenants'])}"


def of_command_line(message: str) -> str:
    """Return argparse's message about a command line in words that say what to write; other messages as they are."""
    if message.startswith(_UNKNOWN):
        return _no_such_argument(message.removeprefix(_UNKNOWN))
    if (found := _NEEDLESS.match(message)) is not None:
        return f"{found[1]}: the flag accepts no value; write {found[1]} or {found[2]}"
    if (found := _MISSING.match(message)) is not None:
        return f"{found[1]}: the value is missing"
    return message


def _no_such_argument(arguments: str) -> str:
    """Say that an argument is no flag, and which flag was perhaps meant."""
    name = arguments.partition(" ")[0]
    if not name.startswith("-"):
        return f"{arguments}: only flags are accepted, such as --config FILE"
    flags = [flag(one) for one in (*Settings.model_fields, CONFIG)]
    found = difflib.get_close_matches(name.partition("=")[0].replace("_", "-"), flags, n=1)
    meant = f"; did you mean {found[0]}?" if found else ""
    return f"{arguments}: there is no such flag{meant}"


def _complaint(error: "ErrorDetails", origins: Sequence[Origin]) -> str:
    """Return a sentence about one wrong setting, or about several that do not go together."""
    path = error["loc"]
    is_ours = error["type"] == "value_error"
    message = error["msg"].removeprefix("Value error, ")
    if not path:
        return _of_several(message, origins)
    named = [part for part in path if part != _KEY]
    where = next((one.where(path) for one in origins if one.has(named)), _dotted(path))
    if error["type"] == "extra_forbidden":
        return f"{where}: {no_such(_dotted(path))}"
    wanted = _wanted(path)
    if is_ours or not wanted:
        return f"{where}: {message}"
    return f"{where}: it is {_shown(error['input'])}; write {wanted}"


def _of_several(message: str, origins: Sequence[Origin]) -> str:
    """Return a message about settings that do not go together, with each name as it was written."""
    names = [name for name in _OF_SEVERAL.findall(message) if "_" in name]
    first = next((one for one in origins if any(one.has([name]) for name in names)), None)
    if first is None:
        of_tenants = next((one for one in origins if one.has(["tenants"])), None)
        return message if of_tenants is None else f"{of_tenants.where(['tenants'])}: {message}"

    def spelt(found: re.Match[str]) -> str:
        name = found[0]
        origin = next((one for one in origins if one.has([name])), first)
        return origin.spelt(name) if "_" in name else name

    said = _OF_SEVERAL.sub(spelt, message)
    return f"{first.file}: {said}" if first.kind == "file" else said


def _wanted(path: Sequence[int | str]) -> str:
    """Return what a setting, or a part of one, may be; empty if pydantic's own message says it."""
    if path[0] == "tenants":
        return _wanted_of_tenants(path)
    field = Settings.model_fields.get(str(path[0]))
    return "" if field is None else _wanted_by(field)


def _wanted_of_tenants(path: Sequence[int | str]) -> str:
    if path[-1] == _KEY:
        return f"a name of 1 to {TENANT_CHARACTERS_MAX} characters"
    field = TenantSettings.model_fields.get(str(path[-1])) if len(path) > 2 else None  # noqa: PLR2004 - tenants, name
    if field is not None:
        return _wanted_by(field)
    return 'limits such as {"min_percent": 20}' + (" for each tenant" if len(path) == 1 else "")


def _wanted_by(field: "FieldInfo") -> str:
    """Return what a setting may be, by its type and its bounds."""
    kind = field.annotation
    if WRITTEN in field.metadata:
        return f"a number of bytes{_range(field)}, with or without a unit, as in 8GiB"
    if kind is int or kind is float:
        return f"a {'whole ' if kind is int else ''}number{_range(field)}"
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if any(getattr(one, "pattern", "") for one in field.metadata):
        return "an address that starts with http:// or https:// and has no spaces"
    return "a string" if kind is str else "a path"


def _range(field: "FieldInfo") -> str:
    bounds = dict(_bounds(field))
    least = f" above {bounds['gt']:,} and" if "gt" in bounds else f" from {bounds['ge']:,}"
    return f"{least}{' at most' if 'gt' in bounds else ' to'} {bounds['le']:,}"


def _bounds(field: "FieldInfo") -> Iterator[tuple[str, float]]:
    for one in field.metadata:
        for name in ("ge", "gt", "le"):
            if hasattr(one, name):
                yield name, getattr(one, name)


def _shown(value: object) -> str:
    """Return a wrong value in a form that fits into a sentence."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _printable(str(value)[:_SHOWN_MAX]) or "empty"


def _dotted(path: Sequence[int | str]) -> str:
    return ".".join(_printable(str(part)) for part in path if part != _KEY)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
