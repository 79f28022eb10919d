"""Own how the arguments of `vllm serve` are read: those that a plan depends on, and the names of all others."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvlease.cli.plan.vllm import table
from kvlease.errors import InvalidError

_HUMAN: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_NUMBER_CHARACTERS_MAX: Final = 18
_POWER: Final = {letter: power for power, letter in enumerate("kmgt", 1)}

_WITH_NO: Final = table.SWITCHES | table.IGNORED_SWITCHES | table.REFUSED
_NAMES: Final = frozenset(
    _WITH_NO
    | table.IGNORED_LISTS
    | table.VALUES
    | table.IGNORED_VALUES
    | {f"no-{name}" for name in _WITH_NO}
    | {name.removeprefix("--") for name in table.ALIASES if name.startswith("--")}
)
"""The long names of all arguments, and of what switches them off."""


@dataclass(slots=True, kw_only=True)
class Given:
    """What a command line of vLLM says about a plan."""

    values: dict[str, str] = field(default_factory=dict)
    """The arguments that have a value, by their names without dashes in front."""
    switches: dict[str, bool] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    """The names of arguments that do not matter to a plan."""

    def count(self, name: str) -> int | None:
        """Return a number, read with vLLM's suffixes: 1k is 1,000 and 1K is 1,024; None if it is not given.

        Raises:
            InvalidError: it is no such number.
        """
        written = self.values.get(name)
        number = None if written is None else _number(name, written)
        if number == 0 and name in table.AT_LEAST_ONE:
            message = f"--{name} is 0; vLLM needs at least 1"
            raise InvalidError(message, resource=name, rule="not_a_number")
        return number

    def config(self, name: str) -> dict[str, Any]:
        """Return a config given as JSON; an empty one if it is not given.

        Raises:
            InvalidError: it is no object of JSON.
        """
        written = self.values.get(name, "{}")
        try:
            config = json.loads(written)
        except ValueError as error:
            why = str(error)
        else:
            if isinstance(config, dict):
                return config
            why = "it must be an object"
        message = f"--{name} is {written[:40]!r}, which is not JSON that vLLM accepts: {why}"
        raise InvalidError(message, resource=name, rule="not_json")


def read_arguments(words: Sequence[str], own: Collection[str] = ()) -> Given:
    """Return what a command line says, with or without `vllm serve` in front; `own` are options of ours beside it.

    Raises:
        InvalidError: an argument is not known, may change the plan in a way that is not planned here, or lacks a value.
    """
    left = list(words)
    for word in ("vllm", "serve"):
        if left[:1] == [word]:
            left.pop(0)
    given = Given()
    if left and not left[0].startswith("-"):
        given.values["model"] = left.pop(0)
    while left:
        _read(left, given, own)
    return given


def _read(left: list[str], given: Given, own: Collection[str]) -> None:
    """Take one argument off the line."""
    word = left.pop(0)
    if not word.startswith("-"):
        message = f"{word[:40]!r} does not belong to any argument of vLLM"
        raise InvalidError(message, resource="vllm", rule="unknown_argument")
    if word.startswith("-O") and word not in {"-O", "-O.", "-O="}:
        # An optimisation level may follow its letter directly, or after an equals sign.
        given.ignored.append("optimization-level")
        return
    name, is_joined, value = word.partition("=")
    # vLLM accepts underscores for dashes, and --config.part for one part of a JSON config.
    name, _, part = name.replace("_", "-").partition(".")
    if name.startswith("--") and word.partition("=")[0] not in own:
        name = f"--{_whole(name.removeprefix('--'))}"
    name = table.ALIASES.get(name, name.removeprefix("--"))
    is_yes = not name.startswith("no-")
    bare = name.removeprefix("no-")
    if bare in table.SWITCHES:
        given.switches[bare] = is_yes
    elif bare in table.IGNORED_SWITCHES:
        given.ignored.append(bare)
    elif name in table.IGNORED_LISTS:
        given.ignored.append(name)
        _drop_list(left)
    elif name in table.VALUES or name in table.IGNORED_VALUES:
        if not is_joined:
            value = _next(left, name)
        _note(given, name, part, value)
    else:
        raise _refused(name, word, own)


def _whole(name: str) -> str:
    """Return the only argument that begins so, as vLLM's parser does; the name as it is, if there is not just one."""
    if name in _NAMES:
        return name
    found = [one for one in _NAMES if one.startswith(name)]
    return found[0] if len(found) == 1 else name


def _note(given: Given, name: str, part: str, value: str) -> None:
    if name in table.IGNORED_VALUES:
        given.ignored.append(name)
    elif part:
        config = given.config(name)
        given.values[name] = json.dumps({**config, part.replace("-", "_"): value})
    else:
        given.values[name] = value


def _next(left: list[str], name: str) -> str:
    # A negative number is a value.
    if not left or (left[0].startswith("-") and not left[0][1:].isdecimal()):
        message = f"--{name} of vLLM needs a value"
        raise InvalidError(message, resource=name, rule="missing_value")
    return left.pop(0)


def _drop_list(left: list[str]) -> None:
    while left and not left[0].startswith("-"):
        left.pop(0)


def _refused(name: str, word: str, own: Collection[str]) -> InvalidError:
    if name.removeprefix("no-") in table.REFUSED:
        message = (
            f"--{name} may change the layers, pages or tables of a cache in ways that are not planned here; "
            "start the engine with a connector, which compares its plan with what vLLM has"
        )
        return InvalidError(message, resource=name, rule="argument_not_planned")
    message = f"{word[:60]!r} is not an argument of vllm serve 0.32"
    if word.partition("=")[0] in own:
        message += (
            "; put options of kvlease plan before --vllm, as all that follows it is read as vLLM's"
        )
    return InvalidError(message, resource="vllm", rule="unknown_argument")


def _number(name: str, written: str) -> int:
    if len(written.strip()) > _NUMBER_CHARACTERS_MAX:
        raise _no_number(name, written)
    found = _HUMAN.fullmatch(written.strip())
    if found is None:
        if not written.strip().isdecimal():
            raise _no_number(name, written)
        return int(written)
    number, letter = found.groups()
    if letter.islower():
        thousands: int = 1000 ** _POWER[letter]
        return int(float(number) * thousands)
    if not number.isdecimal():
        raise _no_number(name, written)
    return int(number) << 10 * _POWER[letter.lower()]


def _no_number(name: str, written: str) -> InvalidError:
    message = (
        f"--{name} is {written[:40]!r}; write a number, such as 2048, 2k (2,000) or 2K (2,048)"
    )
    return InvalidError(message, resource=name, rule="not_a_number")
