"""Own the address of a remote store: whether it is one, and how a text tells it without a password."""

import re
from typing import Final
from urllib.parse import urlsplit

SCHEMES: Final = ("redis", "rediss", "unix", "mooncake")
"""The Redis protocol over TCP, TLS or a Unix socket, and Mooncake Store."""
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/]*@")
_SHOWN_MAX: Final = 40
"""Characters of a wrong scheme that are repeated."""


def check_address(url: object) -> str:
    """Return an address if it is one, or nothing for none.

    Raises:
        ValueError: it is none; the message repeats nothing but the scheme, as there may be a password in the rest.
    """
    if url is None or url == "":
        return ""
    schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    if not isinstance(url, str) or not url.isprintable() or "://" not in url:
        message = f"it must start with one of {schemes}"
        raise ValueError(message)
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        # What stands before the first colon of such a text may be a password, too, if it looks like no scheme.
        shown = scheme[:_SHOWN_MAX] if re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) else "unknown"
        message = f"its scheme is {shown}; it must start with one of {schemes}"
        raise ValueError(message)
    if not _is_whole(url):
        message = "there must be a host and a port behind the scheme, or the path of a socket behind unix://"
        raise ValueError(message)
    return url


def without_credentials(text: str) -> str:
    """Return a text in which addresses have no user and no password."""
    return _CREDENTIALS.sub("***@", text)


def _is_whole(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return len(parts.path) > 1
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
