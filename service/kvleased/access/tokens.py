"""Own the files of the bearer tokens that make callers over TCP readers, joiners or operators.

Workers' tokens are not among them: attach hands them out, and the registry knows them.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Mapping
from hmac import compare_digest
from pathlib import Path
from typing import Final

from kvleased.access.roles import Role
from kvleased.system.directories import UnusableError

_NUM_BYTES: Final = 16
"""Random bytes of a token that we make; it is written in hex."""
CHARACTERS_MIN: Final = 16
"""Characters of the shortest token that is accepted from a file: 64 bits in hex."""
CHARACTERS_MAX: Final = 512
"""Characters of the longest token."""
_ADVICE: Final = "make one with: (umask 077; openssl rand -hex 16 > FILE)"


class Keyring:
    """The tokens of roles."""

    def __init__(self, tokens: Mapping[Role, str]) -> None:
        """Take the token of each role."""
        self._tokens = tuple((role, token.encode()) for role, token in tokens.items())

    def __repr__(self) -> str:
        """Show which roles have a token, but never the tokens."""
        return f"<Keyring {', '.join(role.value for role, _ in self._tokens) or 'empty'}>"

    @classmethod
    def of_words(cls, words: Mapping[str, str]) -> "Keyring":
        """Return the keyring of the tokens that `words` returned."""
        return cls({Role(role): token for role, token in words.items()})

    @property
    def words(self) -> dict[str, str]:
        """The tokens, by the words of their roles."""
        return {role.value: token.decode() for role, token in self._tokens}

    def has_token_of(self, role: Role, other: "Keyring") -> bool:
        """Tell whether a role has the same token here as among others."""
        return self.words.get(role.value) == other.words.get(role.value)

    def role_of(self, token: str) -> Role:
        """Return the role of a token, or STRANGER; the time that this takes does not tell how much of it was right."""
        found, given = Role.STRANGER, token.encode("utf-8", "surrogateescape")
        for role, own in self._tokens:
            if compare_digest(own, given):
                found = role
        return found


def ensure(paths: Mapping[Role, Path]) -> Keyring:
    """See that each file has a token: check those that exist, and make the others; return them.

    Raises:
        UnusableError: a token cannot be used, or cannot be made, or two roles have the same.
    """
    for path in paths.values():
        if not path.exists():
            try:
                _make(path)
            except OSError as error:
                message = (
                    f"token file {path} cannot be created: {error.strerror}; name another file"
                )
                raise UnusableError(message) from error
    return load(paths)


def load(paths: Mapping[Role, Path]) -> Keyring:
    """Return the tokens in existing files.

    Raises:
        UnusableError: a token cannot be used, or two roles have the same.
    """
    tokens: dict[Role, str] = {}
    for role, path in paths.items():
        token = _read(path)
        if token in tokens.values():
            message = f"token file {path} holds the same token as another token file; each role needs its own token"
            raise UnusableError(message)
        tokens[role] = token
    return Keyring(tokens)


def _read(path: Path) -> str:
    try:
        # Links are followed: Kubernetes mounts secrets by links.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        message = f"token file {path} cannot be used: {error.strerror}"
        raise UnusableError(message) from error
    try:
        _check(path, os.fstat(fd))
        text = os.read(fd, CHARACTERS_MAX + 2).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    is_token = text.isascii() and text.isprintable() and " " not in text
    if not is_token or not CHARACTERS_MIN <= len(text) <= CHARACTERS_MAX:
        message = (
            f"token file {path} cannot be used: a token must be {CHARACTERS_MIN} to {CHARACTERS_MAX} printable ASCII "
            f"characters without spaces; {_ADVICE}"
        )
        raise UnusableError(message)
    return text


def _check(path: Path, status: os.stat_result) -> None:
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_uid not in {0, os.getuid()}:
        reason = f"it belongs to user {status.st_uid}, neither to user {os.getuid()} nor to root"
    elif status.st_mode & 0o027:
        mode = stat.S_IMODE(status.st_mode)
        reason = (
            f"its mode is {mode:04o}, so other users can read or write it; make a new token and "
            "chmod 600 the file"
        )
    if reason:
        message = f"token file {path} cannot be used: {reason}; {_ADVICE}"
        raise UnusableError(message)


def _make(path: Path) -> None:
    """Make a token file, whole or not at all; if several processes make one at once, one wins."""
    own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(own, flags, 0o600)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "its directory does not exist") from error
    try:
        os.fchmod(fd, 0o600)  # whatever the umask has taken away
        os.write(fd, f"{secrets.token_hex(_NUM_BYTES)}\n".encode())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        os.close(fd)
        own.unlink()
