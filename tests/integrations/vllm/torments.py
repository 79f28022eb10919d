"""Own the faults that a soak inflicts on a daemon and on engines, one after the other, each undone in time."""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.soaking import Seat, Tally
from tests.later import Later


class Tormentor:
    """Inflict one fault after the other on daemon and engines."""

    def __init__(self, seed: object, daemon: Daemon, seats: Sequence[Seat], tally: Tally) -> None:
        self.random = random.Random(f"torments {seed}")  # noqa: S311 - faults, no secrets
        self._daemon = daemon
        self._seats = seats
        self._tally = tally
        self._later = Later()
        self._is_away = False

    def act(self) -> None:
        """Inflict one fault at random."""
        torments: dict[Callable[[], bool], int] = {
            self.kill_control: 4,
            self.stop_control: 4,
            self.kill_daemon: 2,
            self.stop_daemon: 3,
            self.stop_supervisor: 1,
            self.kill_engine: 5,
            self.stop_engine: 5,
            self.doom_engine: 5,
        }
        (torment,) = self.random.choices(list(torments), list(torments.values()))
        if torment():
            self._tally.faults[torment.__name__] += 1

    def undo_due(self) -> None:
        """Undo the faults that are due."""
        self._later.do_due()

    def undo_all(self) -> None:
        """Undo all faults."""
        self._later.do_all()

    def kill_control(self) -> bool:
        """Kill the control process, which the supervisor restarts over the same memory."""
        return self._signal(self._control(), signal.SIGKILL)

    def stop_control(self) -> bool:
        """Stop the control process, mostly for longer than an engine waits."""
        return self._pause(self._control())

    def stop_supervisor(self) -> bool:
        """Stop the supervisor, so that nobody restarts ended processes."""
        return not self._is_away and self._pause(self._daemon.pid)

    def kill_daemon(self) -> bool:
        """Kill the whole daemon with its memory; another one starts after a while."""
        if self._is_away:
            return False
        self._is_away = True
        self._daemon.kill()
        self._after(self.random.choice([0, 1, 3]), self._come_back)
        return True

    def stop_daemon(self) -> bool:
        """Stop the whole daemon."""
        if self._is_away:
            return False
        self._is_away = True
        self._daemon.freeze()
        self._after(self._moment(), self._thaw)
        return True

    def kill_engine(self) -> bool:
        """Kill an engine in the middle of anything."""
        self.random.choice(self._seats).kill()
        return True

    def stop_engine(self) -> bool:
        """Stop an engine."""
        seat = self.random.choice(self._seats)
        if not seat.stop():
            return False
        self._after(self._moment(), seat.resume)
        return True

    def doom_engine(self) -> bool:
        """Have an engine die between naming blocks and writing them."""
        self.random.choice(self._seats).doom()
        return False

    def _come_back(self) -> None:
        self._daemon.start()
        self._is_away = False

    def _thaw(self) -> None:
        self._daemon.thaw()
        self._is_away = False

    def _control(self) -> int | None:
        if not self._is_away:
            with contextlib.suppress(OSError):
                return self._daemon.control()
        return None

    def _moment(self) -> float:
        """Return a number of seconds: mostly few, sometimes more than anybody waits."""
        return min(6.0, self.random.expovariate(0.7))

    def _pause(self, process_id: int | None) -> bool:
        is_stopped = self._signal(process_id, signal.SIGSTOP)
        if is_stopped:
            self._after(self._moment(), lambda: self._go_on(process_id))
        return is_stopped

    def _go_on(self, process_id: int | None) -> None:
        self._signal(process_id, signal.SIGCONT)

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.put(seconds, undo)

    @staticmethod
    def _signal(process_id: int | None, number: signal.Signals) -> bool:
        if process_id is None:
            return False
        try:
            os.kill(process_id, number)
        except ProcessLookupError:
            return False
        return True
