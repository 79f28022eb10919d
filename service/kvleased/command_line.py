"""Own the command line of `kvleased`; the work of each process is in modules of its own."""

import argparse
import fcntl
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvlease._output import written_or_refused
from kvleased.telemetry import logs, streams

if TYPE_CHECKING:
    from kvleased.config.settings import Settings

_MOVERS: Final = {
    "mover": "kvleased.movers.engine",
    "disk-mover": "kvleased.movers.disk.engine",
    "remote-mover": "kvleased.movers.remote.engine",
}
"""The modules of the processes that move bytes, by role."""
_USAGE: Final = """usage: kvleased serve [options]
       kvleased probe [livez|readyz|startupz]
       kvleased --version

Run the KV-cache daemon of this node. `kvleased serve --help` lists every setting with its unit and its default.
"""


def main() -> NoReturn:
    """Run `kvleased` and exit with its status."""
    streams.open_closed()
    logs.catch_all(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one role: people call `serve`, `probe` and `--version`; the daemon starts its own processes with the rest."""
    role = argv[0] if argv else ""
    if role == "serve":
        return _serve(argv[1:])
    if role in {"supervise", "control", *_MOVERS}:
        return _run_role(role, argv[1:])
    if role == "look":
        from kvleased.memory import looking  # noqa: PLC0415 - no other role needs it

        return looking.run(argv[1:])
    if role == "probe":
        from kvleased import probing  # noqa: PLC0415 - no other role needs it

        return probing.run(argv[1:])
    if role == "--version":
        return _print_version()
    return _print_usage(role)


def _serve(argv: Sequence[str]) -> int:
    """Resolve the settings, then replace this process by the supervisor, which imports nothing that resolves them."""
    try:
        from kvleased.config.sources import load, unknown_variables  # noqa: PLC0415

        settings = load(argv)
        _warn_of(unknown_variables(), settings.log_level)
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed; the daemon needs kvlease[service]")
    from kvleased.system.directories import UnusableError  # noqa: PLC0415

    try:
        settings = _with_device(settings)
        own_fds, lock_fds = _enter(settings)
    except UnusableError as error:
        return _refuse(str(error))
    settings_fd = os.memfd_create("kvlease:settings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(settings_fd, settings.model_dump_json().encode())
    fcntl.fcntl(
        settings_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    )
    for fd in (*own_fds, *lock_fds, settings_fd):
        os.set_inheritable(fd, True)
    arguments = [sys.executable, "-P", "-m", "kvleased", "supervise"]
    # The locks on the directory of the sockets end with the supervisor, the others with the last process.
    arguments += ["--settings-fd", str(settings_fd), "--lock-fds", *map(str, lock_fds)]
    return os.execve(sys.executable, arguments, _without_settings())  # noqa: S606


def _with_device(settings: "Settings") -> "Settings":
    """Check that the device exists and can be used; return the settings with the default that its size decides.

    Raises:
        UnusableError: the device cannot be used; the message says what to do.
    """
    if not settings.is_on_gpu:
        return settings
    from kvleased.memory import looking  # noqa: PLC0415 - only where there is a GPU

    facts = looking.look_at(settings.device)
    default_bytes = settings.device_bytes_default or facts["total_bytes"] // 4
    return settings.model_copy(update={"device_bytes_default": default_bytes})


def _enter(settings: "Settings") -> tuple[list[int], list[int]]:
    """Enter all directories and check the other files; return the locks on the runtime directory, and on the others.

    Raises:
        UnusableError: a directory or a file is not as it must be; the message says what to do.
    """
    from kvleased.access import tokens  # noqa: PLC0415
    from kvleased.config.addresses import unreadable_file  # noqa: PLC0415
    from kvleased.credentials import secret  # noqa: PLC0415
    from kvleased.system import directories  # noqa: PLC0415

    if reason := unreadable_file(settings.remote_url):
        raise directories.UnusableError(reason)

    own_fds = [directories.enter("--runtime-dir", settings.runtime_dir, may_make=True)]
    stores = {
        option: directory
        for option, directory in (
            ("--host-dir", settings.host_dir),
            ("--disk-dir", settings.disk_dir),
        )
        if directory is not None
    }
    lock_fds = [directories.enter(option, directory) for option, directory in stores.items()]
    if not any(settings.runtime_dir.samefile(directory) for directory in stores.values()):
        own_fds.append(directories.hold("--runtime-dir", settings.runtime_dir))
    if settings.host_dir is not None:
        directories.require_memory("--host-dir", settings.host_dir)
    if settings.secret_path is not None:
        secret.ensure(settings.secret_path, settings.other_secret_path)
    tokens.ensure(settings.token_paths)
    _try_tls(settings)
    return own_fds, lock_fds


def _try_tls(settings: "Settings") -> None:
    """Refuse files that TLS cannot be served with, before any process is started."""
    if settings.tls_cert_file is not None:
        from kvleased.credentials.tls import tls_files  # noqa: PLC0415 - few need it

        files = tls_files(settings)
        assert files is not None, "the settings name both files or neither"
        files.context()


def _without_settings() -> dict[str, str]:
    """Return the environment without the settings: these are passed on by descriptor, as some of them are secret."""
    from kvleased.config.sources import is_setting  # noqa: PLC0415

    return {name: value for name, value in os.environ.items() if not is_setting(name)}


def _warn_of(unknown: Mapping[str, str], log_level: str) -> None:
    """Log each environment variable that is ignored, once: the processes that follow do not read them."""
    logs.set_level(log_level)
    for variable, reason in unknown.items():
        logs.line("warning", "unknown_variable_ignored", variable=variable, reason=reason)


def _print_usage(role: str) -> int:
    if role in {"-h", "--help"}:
        with written_or_refused("kvleased"):
            sys.stdout.write(_USAGE)
        return 0
    wrong = f"kvleased: {role!r} is not a command\n" if role else ""
    sys.stderr.write(wrong + _USAGE)
    return 2


def _print_version() -> int:
    from kvlease._version import installed_version  # noqa: PLC0415 - no role needs it

    with written_or_refused("kvleased"):
        sys.stdout.write(f"kvleased {installed_version()}\n")
    return 0


def _refuse(reason: str) -> int:
    sys.stderr.write(f"kvleased: {reason}\n")
    return os.EX_CONFIG


def _run_role(role: str, argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"kvleased {role}", description="Started by `kvleased serve`."
    )
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument(
        "--spawned",
        type=float,
        default=0.0,
        help="monotonic seconds at which the process was started",
    )
    for name in ("settings", "keeper", "link", "directory", "disk-directory"):
        parser.add_argument(f"--{name}-fd", type=int, default=-1)
    parser.add_argument("--lock-fds", type=int, nargs="*", default=[])
    arguments = parser.parse_args(argv)
    logs.hold_up_nobody()
    if arguments.settings_fd >= 0:
        logs.set_level(_settings_in(arguments.settings_fd).get("log_level", "info"))
    if role == "supervise":
        return _supervise(arguments.settings_fd, arguments.lock_fds)

    from kvleased.supervision.processes import die_with, give_way, leave_descriptors  # noqa: PLC0415

    die_with(arguments.parent)
    leave_descriptors()
    if role in _MOVERS:
        give_way()
        # Each mover imports only what it needs: the memory mover imports no store, and so starts sooner.
        fds = [arguments.link_fd, arguments.settings_fd]
        if role == "disk-mover":
            fds.append(arguments.directory_fd)
        importlib.import_module(_MOVERS[role]).main(*fds)
        return 0
    logs.import_structlog()
    from kvleased.control.process import main as control  # noqa: PLC0415

    host_fd, disk_fd = (
        None if fd < 0 else fd for fd in (arguments.directory_fd, arguments.disk_directory_fd)
    )
    return control(arguments.settings_fd, arguments.keeper_fd, arguments.spawned, host_fd, disk_fd)


def _settings_in(settings_fd: int) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    return settings


def _supervise(settings_fd: int, lock_fds: Sequence[int]) -> int:
    from pathlib import Path  # noqa: PLC0415

    from kvleased.supervision.epochs import Epochs  # noqa: PLC0415
    from kvleased.supervision.processes import CONTROL, DISK_MOVER, movers_of  # noqa: PLC0415
    from kvleased.supervision.supervisor import Supervisor  # noqa: PLC0415
    from kvleased.telemetry.notifying import VARIABLE, Notifier  # noqa: PLC0415

    for fd in (settings_fd, *lock_fds):
        os.set_inheritable(fd, False)
    settings = _settings_in(settings_fd)
    # A lock's descriptor stays right even if the path leads elsewhere: the first is host_dir's, the last disk_dir's.
    directory_fds: dict[str, dict[str, int]] = {CONTROL: {}}
    if settings["disk_dir"]:
        directory_fds[DISK_MOVER] = {"directory": lock_fds[-1]}
        directory_fds[CONTROL]["disk-directory"] = lock_fds[-1]
    if settings["host_dir"]:
        directory_fds[CONTROL]["directory"] = lock_fds[0]
    supervisor = Supervisor(
        settings_fd,
        settings["drain_seconds"],
        silent_seconds_max=settings["control_silent_seconds_max"],
        movers=movers_of(settings),
        lock_fds=lock_fds,
        directory_fds=directory_fds,
        notifier=Notifier(os.environ.get(VARIABLE, "")),
    )
    places: list[tuple[Path, int | None]] = [(Path(settings["runtime_dir"]), None)]
    if settings["disk_dir"]:
        places.append((Path(settings["disk_dir"]), lock_fds[-1]))
    supervisor.epochs = Epochs(places)
    return supervisor.run()
