"""Own a real redis-server of a test's own."""

import shutil
import subprocess
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tests.servers import debian
from tests.servers.processes import ServerProcess, free_port


class RedisServer(ServerProcess):
    """A server that keeps nothing on disk, on a Unix socket and a port of loopback, or that port with TLS."""

    def __init__(self, folder: Path, *options: str, is_tls: bool = False) -> None:
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.certificate = folder / "certificate.pem"
        command = [debian.program("redis-server", debian.REDIS), "--bind", "127.0.0.1"]
        command += ["--save", "", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        if is_tls:
            _make_certificate(folder)
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            for name, file in (("cert", "certificate"), ("key", "key"), ("ca-cert", "certificate")):
                command += [f"--tls-{name}-file", f"{folder}/{file}.pem"]
        else:
            command += ["--port", str(self.port)]
        is_installed = shutil.which("redis-server")
        libraries = {} if is_installed else {"LD_LIBRARY_PATH": debian.library_path(debian.REDIS)}
        super().__init__([*command, *options], folder, libraries)
        self.come_up()

    def come_up(self) -> None:
        """Start it, also after it was killed."""
        self.start(self._is_ready)

    def client(self) -> Redis:
        """Return a second client, which does with the values what it likes."""
        return Redis(unix_socket_path=str(self.socket), protocol=2, retry=Retry(NoBackoff(), 0))

    @property
    def url(self) -> str:
        """Where the server is, over TCP."""
        return f"redis://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except RedisError as error:
            return "NOAUTH" in str(error) or "Authentication" in str(error)


def _make_certificate(folder: Path) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out certificate.pem"
    )
    options = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *options], cwd=folder, check=True, capture_output=True)
