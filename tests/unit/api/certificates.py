"""Make a test's own certificates: an authority's, a server's for loopback, and clients'."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    cert_file: Path
    key_file: Path


class Authority:
    """An authority that signs, with its files in a directory."""

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
        """Return a certificate for a name, valid for loopback and for some days."""
        cert, key = self._directory / f"{common_name}.pem", self._directory / f"{common_name}.key"
        request, more = self._ask(common_name, key)
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

    def sign_between(self, common_name: str, begins_days: float, ends_days: float) -> Pair:
        """Return a certificate for a name, valid between two times, in days from now; either may be past."""
        cert, key = self._directory / f"{common_name}.pem", self._directory / f"{common_name}.key"
        request, more = self._ask(common_name, key)
        config = self._directory / "authority.conf"
        (self._directory / "signed").touch()
        config.write_text(_CONFIG.format(directory=self._directory))
        dates = [
            f"{datetime.now(UTC) + timedelta(days=days):%Y%m%d%H%M%SZ}"
            for days in (begins_days, ends_days)
        ]
        signing = ["ca", "-batch", "-notext", "-config", config, "-in", request, "-out", cert]
        signing += ["-cert", self.cert_file, "-keyfile", self._key, "-extfile", more]
        _openssl(*signing, "-startdate", dates[0], "-enddate", dates[1])
        return Pair(cert, key)

    def _ask(self, common_name: str, key: Path) -> tuple[Path, Path]:
        """Make a key; return a request for its certificate, and the extensions for the certificate."""
        request, more = key.with_suffix(".csr"), key.with_suffix(".ext")
        more.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_NEW, "-subj", f"/CN={common_name}", "-keyout", key, "-out", request)
        return request, more


_CONFIG = """
[ca]
default_ca = us
[us]
database = {directory}/signed
new_certs_dir = {directory}
rand_serial = yes
default_md = sha256
unique_subject = no
policy = anybody
[anybody]
commonName = supplied
"""
_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
