"""Certificates of a test's own: an authority, a server's for loopback, and clients'."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    cert_file: Path
    key_file: Path


class Authority:
    """Who signs, in a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self.cert_file, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl(
            "req",
            "-x509",
            *_NEW,
            "-subj",
            f"/CN={name}",
            "-keyout",
            self._key,
            "-out",
            self.cert_file,
            "-days",
            "2",
        )

    def sign(self, common_name: str, days: int = 2) -> Pair:
        """Return a certificate of a name, good for loopback and for some days."""
        cert, key = self._directory / f"{common_name}.pem", self._directory / f"{common_name}.key"
        request, more = (
            self._directory / f"{common_name}.csr",
            self._directory / f"{common_name}.ext",
        )
        more.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_NEW, "-subj", f"/CN={common_name}", "-keyout", key, "-out", request)
        signing = [
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            self.cert_file,
            "-CAkey",
            self._key,
            "-CAcreateserial",
        ]
        _openssl(*signing, "-days", str(days), "-extfile", more, "-out", cert)
        return Pair(cert, key)


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
