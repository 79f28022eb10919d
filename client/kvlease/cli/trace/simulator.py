"""Own how the daemon's policies are found: by their entry point, because the client imports nothing of the service."""

from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Final, Protocol

from kvlease.errors import InvalidError
from kvlease.traces import Simulated, Trace

_GROUP: Final = "kvlease.traces"
_MESSAGE: Final = (
    'the simulator is not installed; in a clone, install it with: pip install ".[service]"'
)


class Simulator(Protocol):
    """The calls that the command line makes to the simulator."""

    def simulate(
        self, trace: Trace, policies: Sequence[str], sizes: Sequence[int]
    ) -> Iterator[Simulated]:
        """Yield what each policy finds in a pool of each size."""


def find_simulator() -> Simulator:
    """Return the simulator of the installed daemon.

    Raises:
        InvalidError: no daemon is installed, or not all that it needs.
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if "traces" not in found:
        raise InvalidError(_MESSAGE, resource="simulator")
    try:
        simulator: Simulator = found["traces"].load()
    except ImportError as error:
        raise InvalidError(f"{_MESSAGE} ({error})", resource="simulator") from error
    return simulator
