"""Own which variables of a shell are for kvlease itself; those for tests, such as KVLEASE_TRACES, are left out."""

from collections.abc import Iterable
from typing import Final

from kvlease._runtime import ADDRESS_VARIABLE
from kvlease.credentials import (
    CA_FILE_VARIABLE,
    CERT_FILE_VARIABLE,
    KEY_FILE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from kvleased.config.setting_faults import PREFIX

_OF_CLIENTS: Final = frozenset(
    {
        ADDRESS_VARIABLE,
        CA_FILE_VARIABLE,
        CERT_FILE_VARIABLE,
        KEY_FILE_VARIABLE,
        TOKEN_FILE_VARIABLE,
    }
)


def of_the_shell(names: Iterable[str]) -> list[str]:
    """Return the names of the variables that clients and daemons read."""
    return [name for name in names if name in _OF_CLIENTS or name.upper().startswith(PREFIX)]
