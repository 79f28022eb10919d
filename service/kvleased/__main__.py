"""Own the command line of `kvleased`; what its processes do is their own modules' business."""

import argparse
import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from kvleased import logs

EX_CONFIG: Final = 78
_USAGE: Final = """usage: kvleased serve [options]
       kvleased --version

Run the KV-cache daemon of this node. `kvleased serve --help` lists every setting with its unit and its default.
"""


def main() -> NoReturn:
    """Run `kvleased` and exit with its status."""
    logs.catch_all(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one role; `serve` is what people call, the others are how the daemon starts its own processes."""
    role = argv[0] if argv else ""
    if role == "serve":
        return _serve(argv[1:])
    if role in {"supervise", "control", "mover", "remote-mover"}:
        return _run_role(role, argv[1:])
    if role == "--version":
        return _print_version()
    is_help = role in {"-h", "--help"}
    (sys.stdout if is_help else sys.stderr).write(_USAGE)
    return 0 if is_help else 2


def _serve(argv: Sequence[str]) -> int:
    """Resolve the settings, then become the supervisor, which imports none of what that took."""
    try:
        from kvleased.settings import load, unknown_variables  # noqa: PLC0415

        settings = load(argv)
        _warn_of(unknown_variables(), settings.log_level)
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed; the daemon needs kvlease[service]")
    try:
        lock_fd = _enter(settings.runtime_dir)
    except OSError as error:
        return _refuse(f"--runtime-dir {settings.runtime_dir} cannot be used: {error.strerror}")
    settings_fd = os.memfd_create("kvlease:settings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(settings_fd, settings.model_dump_json().encode())
    fcntl.fcntl(
        settings_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    )
    for fd in (lock_fd, settings_fd):
        os.set_inheritable(fd, True)
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "kvleased",
        "supervise",
        "--settings-fd",
        str(settings_fd),
    ]
    return os.execv(sys.executable, arguments)  # noqa: S606


def _warn_of(unknown: Mapping[str, str], log_level: str) -> None:
    """Log each variable of the environment that is ignored, once: the processes that follow do not read them."""
    logs.set_level(log_level)
    for variable, reason in unknown.items():
        logs.line("warning", "unknown_variable_ignored", variable=variable, reason=reason)


def _print_version() -> int:
    from kvlease._version import installed_version  # noqa: PLC0415 - no role needs it

    sys.stdout.write(f"kvleased {installed_version()}\n")
    return 0


def _refuse(reason: str) -> int:
    sys.stderr.write(f"kvleased: {reason}\n")
    return EX_CONFIG


def _enter(directory: Path) -> int:
    """Make the directory, only for this user, or take one that is private already, and return a lock on it.

    The mode of a directory that was there before is never changed: others may have their files in it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        directory.chmod(0o700)  # whatever the umask has taken away
    except FileExistsError:
        status = directory.stat()
        advice = "name one that does not exist yet, and it will be made"
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"it is no directory; {advice}") from None
        if status.st_uid != os.getuid():
            reason = f"it belongs to user {status.st_uid}, not to user {os.getuid()}; {advice}"
            raise PermissionError(errno.EPERM, reason) from None
        if status.st_mode & 0o077:
            reason = (
                f"its mode is {stat.S_IMODE(status.st_mode):04o}, so that others may enter it; name one that "
                f"does not exist yet, such as {directory / 'kvlease'}, and it will be made, or make this one "
                "private (chmod 700) where it serves nothing else"
            )
            raise PermissionError(errno.EPERM, reason) from None
    return _lock(directory / "kvleased.lock")


def _lock(path: Path) -> int:
    """Return a descriptor that keeps every other daemon out of the same directory for as long as it is open."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(
            f"kvleased: another daemon serves in {path.parent}; stop it or choose another --runtime-dir\n"
        )
        sys.exit(EX_CONFIG)
    return fd


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
    for name in ("settings", "keeper", "link"):
        parser.add_argument(f"--{name}-fd", type=int, default=-1)
    arguments = parser.parse_args(argv)
    if role == "supervise":
        from kvleased.supervisor import Supervisor  # noqa: PLC0415

        settings_fd: int = arguments.settings_fd
        os.set_inheritable(settings_fd, False)
        settings = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
        return Supervisor(settings_fd, settings["drain_seconds"]).run()

    from kvleased.processes import die_with  # noqa: PLC0415

    die_with(arguments.parent)
    if role == "mover":
        from kvleased.movers.engine import main as move  # noqa: PLC0415

        move(arguments.link_fd)
        return 0
    if role == "remote-mover":
        from kvleased.movers.remote import main as move_remotely  # noqa: PLC0415

        move_remotely(arguments.link_fd, arguments.settings_fd)
        return 0
    logs.import_structlog()
    from kvleased.control import main as control  # noqa: PLC0415

    return control(arguments.settings_fd, arguments.keeper_fd, arguments.spawned)


if __name__ == "__main__":
    main()
