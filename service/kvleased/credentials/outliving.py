"""Own the tokens and the certificate that a control process begins with, and their copies that outlive it.

The supervisor keeps the copies, in memory alone. So if files cannot be used, the credentials that were read before stay
in force, even if the control process that had read them has ended.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvleased.access import tokens
from kvleased.config.settings import Settings
from kvleased.credentials.renewing import CERTIFICATE, TOKENS, Renewal
from kvleased.credentials.tls import TlsFiles, tls_files
from kvleased.supervision.keeper import Kept
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.system.directories import UnusableError

_PREFIX: Final = "credentials/"
"""The beginning of the names of kept copies."""
_TLS: Final = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
"""The settings that name the files of TLS."""


class Copies:
    """Copies of the credentials in force."""

    def __init__(self, keeper: KeeperLink, kept: Iterable[Kept]) -> None:
        """Take over the copies of an earlier life."""
        self._keeper = keeper
        self._found: dict[str, Mapping[str, str]] = {}
        for item in kept:
            if item.name.startswith(_PREFIX):
                content = os.pread(item.fd, os.fstat(item.fd).st_size, 0)
                os.close(item.fd)
                self._found[item.name.removeprefix(_PREFIX)] = json.loads(content)

    def __repr__(self) -> str:
        """Show what there were copies of, but never the copies."""
        return f"<Copies of {', '.join(self._found) or 'nothing'}>"

    def of(self, what: str) -> Mapping[str, str]:
        """Return the credentials that an earlier life had in force; empty if there were none."""
        return self._found.get(what, {})

    def keep(self, what: str, parts: Mapping[str, str]) -> None:
        """Have the supervisor keep a copy in place of the one before."""
        fd = _memory(what, json.dumps(dict(parts)))
        self._keeper.keep(f"{_PREFIX}{what}", fd, {})
        os.close(fd)


def begin(
    settings: Settings,
    copies: Copies,
    renewal: Renewal,
    take_tokens: Callable[[tokens.Keyring], None],
    take_certificate: Callable[[TlsFiles], None],
) -> Settings:
    """Take the tokens as they are now, and take changes of them and of the certificate from now on.

    Returns the settings with files that TLS can be served with: copies, if the configured files cannot be used.

    Raises:
        UnusableError: files cannot be used, and there is no copy.
    """

    def took_tokens(keyring: tokens.Keyring) -> None:
        take_tokens(keyring)
        copies.keep(TOKENS, keyring.words)

    def took_certificate(files: TlsFiles) -> None:
        try:
            take_certificate(files)
        except OSError as error:
            # Each server reads the files anew, and one may have gone since they were tried.
            message = f"TLS cannot be served with {files.cert_file} and {files.key_file}: {error.strerror or error}"
            raise UnusableError(message) from error
        _copy(files, copies)

    _begin_tokens(settings, copies, renewal, took_tokens)
    files = tls_files(settings)
    if files is None:
        return settings
    unusable = _reason(files.context)
    written = copies.of(CERTIFICATE)
    if unusable is not None and not written:
        raise unusable
    renewal.watch_certificate(files, took_certificate)
    if unusable is None:
        _copy(files, copies)
        return settings
    renewal.note_unusable(CERTIFICATE, unusable)
    # Each server that starts reads the copies once more, so they stay open for as long as this process lives.
    paths = {name: Path(f"/proc/self/fd/{_memory(name, text)}") for name, text in written.items()}
    return settings.model_copy(update=paths)


def _begin_tokens(
    settings: Settings,
    copies: Copies,
    renewal: Renewal,
    take: Callable[[tokens.Keyring], None],
) -> None:
    unusable = _reason(lambda: tokens.ensure(settings.token_paths))
    written = copies.of(TOKENS)
    if unusable is not None and not written:
        raise unusable
    renewal.watch_tokens(settings.token_paths, take)
    if unusable is None:
        # Only now that they are watched, so that the first look sees a change that comes meanwhile.
        take(tokens.load(settings.token_paths))
    else:
        take(tokens.Keyring.of_words(written))
        renewal.note_unusable(TOKENS, unusable)


def _reason(act: Callable[[], object]) -> UnusableError | None:
    """Return why something cannot be used; None if it can."""
    try:
        act()
    except UnusableError as error:
        return error
    return None


def _copy(files: TlsFiles, copies: Copies) -> None:
    """Have copies kept of the TLS files that were just taken; if one has gone since, the earlier copies stay."""
    paths = zip(_TLS, (files.cert_file, files.key_file, files.client_ca_file), strict=True)
    with suppress(OSError):
        copies.keep(CERTIFICATE, {name: path.read_text("latin-1") for name, path in paths if path})


def _memory(name: str, text: str) -> int:
    """Return a descriptor of memory that contains a text."""
    fd = os.memfd_create(f"kvlease:{name}", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    with open(fd, "w", encoding="latin-1", closefd=False) as file:
        file.write(text)
    return fd
