"""Own the memory and the children of the daemon; the supervisor has no network and decides nothing about blocks.

The supervisor keeps every descriptor that must outlive the control process: memory regions, and the pidfds of workers.
When the control process ends, the supervisor first kills all movers, so that no copy is still being written when the
next control process reads the state, and then starts all of them anew over the same memory. A mover that ends is
started again alone. A control process that has shown signs of life, and then none for too long, is killed and replaced
like one that ended by itself.

A killed process runs no instruction of its own any more. But it may hang in a call into the kernel, such as on a disk
that does not answer, and then ends only when that call returns. Such a call of a store's mover does not write to a
pool, because the mover reads into memory of its own. So nobody waits for its end longer than a second; a new mover is
started when it has ended.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final

from kvleased.supervision import keeper
from kvleased.supervision.epochs import Epochs
from kvleased.supervision.keeper import Message, Store
from kvleased.supervision.processes import CONTROL, MOVER, Child, spawn
from kvleased.supervision.silence import Silence
from kvleased.supervision.supervisor_outbox import SupervisorOutbox
from kvleased.system.descriptors import ADVICE
from kvleased.telemetry import logs
from kvleased.telemetry.notifying import ALIVE, READY, STOPPING, Notifier

"""Exit status of a control process that cannot start as configured, so that another try is pointless."""
STARTS_MAX: Final = 5
"""Starts of a control process that never served, after which the supervisor gives up."""
BACKOFF_SECONDS_MAX: Final = 5.0
"""Most seconds between the end of a child that keeps ending and its next start."""
STEADY_SECONDS: Final = 5.0
"""Seconds after which a child counts as steady, and its failures are forgotten."""
FAILURES_ONCE_READY_MAX: Final = 1
"""Most failures of a control process that still count once it was ready."""
STORE_SECONDS_MAX: Final = 1.0
"""Seconds that the start of the next control process waits for the end of stores' movers, which may hang."""
END_SECONDS_MAX: Final = 1.0
"""Seconds that the end of the supervisor waits for children that it has killed."""
SPAWN_SECONDS_APART: Final = 1.0
"""Seconds until the next try to start a child for which the kernel had no descriptor, memory or process."""
RESTARTS: Final = ("ended", "silent")
"""How a control process that was replaced had ended: by itself, or killed because it was silent."""
IGNORED: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean nothing here, but would end a process that does not handle them."""
_STANDARD_INPUT: Final = 0
STOP_GRACE_SECONDS: Final = 5.0
"""Seconds that the control process gets to stop after the time for draining."""
_NONE: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType({})


class Supervisor:
    """Start, watch and restart the control process and the movers over memory that it keeps."""

    def __init__(  # noqa: PLR0913 -- one parameter a thing that outlives its children
        self,
        settings_fd: int,
        drain_seconds: float,
        *,
        silent_seconds_max: float = 0.0,
        movers: Sequence[str] = (MOVER,),
        lock_fds: Sequence[int] = (),
        directory_fds: Mapping[str, Mapping[str, int]] = _NONE,
        notifier: Notifier | None = None,
    ) -> None:
        """Take descriptors of the settings, of locks on directories, and, by role and name, of directories.

        The control process is replaced when it has been silent for `silent_seconds_max`; 0 is never. The `notifier` is
        told when the control process serves, of each of its signs of life, and when it is told to stop.
        """
        self._notifier = notifier or Notifier()
        self._settings_fd = settings_fd
        self._drain_seconds = drain_seconds
        self._movers = tuple(movers)
        self._lock_fds = tuple(lock_fds)
        self._directory_fds = directory_fds
        self._store = Store()
        self._children: dict[str, Child] = {}
        self._failures = dict.fromkeys((CONTROL, *movers), 0)
        self._due: dict[str, float] = {}
        self._link: socket.socket | None = None
        self._outbox = SupervisorOutbox()
        self._silence = Silence(silent_seconds_max)
        self._is_too_silent = False
        self._restarts = dict.fromkeys(RESTARTS, 0)
        self._epoch = 0
        self.epochs = Epochs()
        """Gives each life of the control process its number."""
        self._generations = dict.fromkeys(movers, 0)
        self._was_ready = False
        self._is_stopping = False
        self._status: int | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Supervise until told to stop; return the exit status."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        wake_end, signal_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signal_end)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *IGNORED):
            signal.signal(number, lambda *_: None)
        self._selector.register(wake_end, selectors.EVENT_READ, "signal")
        self._start_control()
        while self._status is None:
            moment = min(*self._due.values(), self._silence.due, inf)
            wait_seconds = None if moment == inf else max(0.0, moment - time.monotonic())
            for key, events in self._selector.select(wait_seconds):
                self._dispatch(str(key.data), events, wake_end)
            self._run_due()
            # The link is read first, so that a sign of life counts however late it is read.
            if self._silence.tick(time.monotonic()):
                self._replace_silent()
        self._end_children()
        logs.line("info", "supervisor_ends", status=self._status)
        return self._status

    def _dispatch(self, what: str, events: int, wake_end: int) -> None:
        if what == "signal":
            self._heed(os.read(wake_end, 64))
        elif what == "link":
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                self._read_link()
        elif what not in self._children:
            # Another event of the same round has reaped this child.
            return
        elif what == CONTROL:
            self._control_ended()
        else:
            self._mover_ended(what, self._reap(what))

    def _run_due(self) -> None:
        now = time.monotonic()
        for what in [what for what, when in self._due.items() if when <= now]:
            del self._due[what]
            if what == "kill":
                self._status = 1
            elif what == CONTROL:
                self._start_control()
            else:
                self._start_mover(what)

    # Children

    def _start_control(self) -> None:
        self._epoch = self.epochs.begin()
        started = self._spawn(CONTROL, "keeper", self._directories_of(CONTROL))
        if started is None:
            self._failures[CONTROL] += 1
            if not self._was_ready and self._failures[CONTROL] >= STARTS_MAX:
                self._status = 1
            return
        child, self._link = started
        self._link.setblocking(False)
        self._selector.register(self._link, selectors.EVENT_READ, "link")
        hello = {"op": "hello", "epoch": self._epoch, "num_kept": len(self._store)}
        self._send({**hello, "restarts": self._restarts})
        for message, fds in self._store.handover():
            # The descriptors stay open: the control process drops none before it has got all of them.
            self._send(message, fds, stays=True)
        for role in self._movers:
            if role not in self._children:
                self._start_mover(role)
        logs.line(
            "info",
            "control_started",
            epoch=self._epoch,
            kept=len(self._store),
            child_pid=child.process.pid,
        )

    def _start_mover(self, role: str) -> None:
        started = self._spawn(role, "link", self._directories_of(role))
        if started is None:
            return
        self._generations[role] += 1
        message = {"op": "mover", "role": role, "generation": self._generations[role]}
        with started[1] as ours:
            self._send(message, [ours.fileno()])

    def _directories_of(self, role: str) -> Mapping[str, int]:
        return self._directory_fds.get(role, {})

    def _spawn(
        self, role: str, link_name: str, inherited: Mapping[str, int]
    ) -> tuple[Child, socket.socket] | None:
        """Start and watch a child; return it with our end of its link, or None if the start is tried again later."""
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fds = {link_name: theirs.fileno(), "settings": self._settings_fd, **inherited}
                child = spawn(role, fds, self._lock_fds)
        except OSError as error:
            if ours is not None:
                ours.close()
            logs.line("error", "child_not_started", role=role, error=error.strerror, advice=ADVICE)
            self._due[role] = time.monotonic() + SPAWN_SECONDS_APART
            return None
        self._children[role] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, role)
        return child, ours

    def _reap(self, role: str) -> int:
        child = self._children.pop(role)
        self._selector.unregister(child.pidfd)
        status = child.reap()
        is_steady = time.monotonic() - child.started >= STEADY_SECONDS
        self._failures[role] = 0 if is_steady else self._failures[role] + 1
        return status

    def _backoff(self, role: str) -> float:
        failures = self._failures[role]
        return min(BACKOFF_SECONDS_MAX, 0.1 * 2 ** (failures - 2)) if failures > 1 else 0.0

    def _replace_silent(self) -> None:
        """Kill a control process whose event loop stands still; its end is then handled like any other."""
        child = self._children[CONTROL]
        logs.line(
            "error",
            "control_silent",
            seconds=self._silence.seconds,
            child_pid=child.process.pid,
            advice="it is being killed and started again with the same memory; see control_silent_seconds_max",
        )
        self._silence.end()
        self._is_too_silent = True
        child.process.kill()

    def _control_ended(self) -> None:
        status = self._reap(CONTROL)
        # Messages that it sent before its end still count.
        self._read_link()
        self._close_link()
        self._silence.end()
        if self._is_stopping:
            # SIGTERM may have killed it before it handled that signal, when there was nothing to drain.
            self._status = 0 if status in {0, -signal.SIGTERM} else 1
        elif status == os.EX_CONFIG and not self._was_ready:
            self._status = os.EX_CONFIG
        elif not self._was_ready and self._failures[CONTROL] >= STARTS_MAX:
            self._status = 1
        else:
            self._kill_movers()
            self._restarts[RESTARTS[self._is_too_silent]] += 1
            self._is_too_silent = False
            logs.line("warning", "control_ended", status=status, failures=self._failures[CONTROL])
            self._due[CONTROL] = time.monotonic() + self._backoff(CONTROL)

    def _kill_movers(self) -> None:
        """Kill all movers at once, then wait until the kernel says that none writes to a pool any more."""
        alive = [role for role in self._movers if role in self._children]
        for role in alive:
            self._children[role].process.kill()
        end = time.monotonic() + STORE_SECONDS_MAX
        for role in alive:
            if self._children[role].ends(
                None if role == MOVER else max(0.0, end - time.monotonic())
            ):
                self._reap(role)
            else:
                logs.line("warning", "mover_hangs", role=role, generation=self._generations[role])
            self._failures[role] = 0
        for role in self._movers:
            self._due.pop(role, None)

    def _mover_ended(self, role: str, status: int) -> None:
        if self._is_stopping or CONTROL not in self._children:
            # The start of the next control process starts all movers.
            return
        generation = self._generations[role]
        logs.line("warning", "mover_ended", role=role, status=status, generation=generation)
        self._send({"op": "mover_died", "role": role, "generation": generation})
        self._due[role] = time.monotonic() + self._backoff(role)

    def _heed(self, signals: bytes) -> None:
        """Stop; but if only SIGHUP came and there is no terminal, have changed credentials taken instead."""
        if ignored := set(signals) & set(IGNORED):
            names = [signal.Signals(number).name for number in sorted(ignored)]
            logs.line("warning", "signals_ignored", signals=names)
            signals = bytes(number for number in signals if number not in ignored)
            if not signals:
                return
        if set(signals) != {signal.SIGHUP} or os.isatty(_STANDARD_INPUT):
            self._stop(signals)
        elif self._link is not None:
            self._send({"op": "renew"})

    def _stop(self, signals: bytes) -> None:
        control = self._children.get(CONTROL)
        if self._is_stopping or control is None:
            # A second ^C ends at once. A second SIGTERM does not: it comes by itself when a whole group is told to end.
            if control is None or signal.SIGINT in signals:
                self._status = 0 if control is None else 1
            return
        self._is_stopping = True
        self._notifier.tell(STOPPING)
        # From here on the time to stop is limited anyway.
        self._silence.end()
        control.process.send_signal(signal.SIGTERM)
        self._due["kill"] = time.monotonic() + self._drain_seconds + STOP_GRACE_SECONDS

    def _end_children(self) -> None:
        for child in self._children.values():
            child.process.kill()
        end = time.monotonic() + END_SECONDS_MAX
        for role, child in list(self._children.items()):
            if child.ends(max(0.0, end - time.monotonic())):
                self._reap(role)
            else:
                logs.line("warning", "child_hangs", role=role)

    # The link to the control process

    def _read_link(self) -> None:
        while self._link is not None:
            try:
                received = keeper.receive(self._link)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Raised once if the other end closed with messages unread; what it sent before follows.
                continue
            if received is None:
                # The control process is about to end; its pidfd tells when it has ended.
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._link)
                return
            self._act(*received)

    def _act(self, message: Message, fds: list[int]) -> None:
        operation = message["op"]
        if operation == "recycle_mover":
            role = message["role"]
            if message["generation"] == self._generations[role] and role in self._children:
                # Do not wait for its end, which its pidfd tells: if it hangs in the kernel, that must not block us.
                self._children[role].process.kill()
        elif operation == "alive":
            if not (self._is_stopping or self._is_too_silent):
                self._silence.heard(time.monotonic())
                self._notifier.tell(ALIVE)
        elif operation == "ready":
            self._was_ready = True
            self._notifier.tell(READY)
            # It was able to start, so the next one need not wait long, whatever ended the ones before.
            self._failures[CONTROL] = min(self._failures[CONTROL], FAILURES_ONCE_READY_MAX)
        else:
            for reply, reply_fds in self._store.act(message, fds):
                self._send(reply, reply_fds)

    def _send(self, message: Message, fds: Sequence[int] = (), *, stays: bool = False) -> None:
        self._outbox.send(self._link, message, fds, stays=stays)
        self._want_write(bool(self._outbox))

    def _flush(self) -> None:
        self._outbox.flush(self._link)
        self._want_write(bool(self._outbox))

    def _want_write(self, wanted: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(self._link, events, "link")  # type: ignore[arg-type]  # None raises ValueError

    def _close_link(self) -> None:
        self._outbox.discard()
        if self._link is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._link)
            self._link.close()
            self._link = None
