"""Own the text that Prometheus reads; it is made piece by piece, so that no call waits for the whole of it."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

SAMPLES_AT_ONCE: Final = 50
"""Most samples of one piece."""
_LINES_OF_HEAD: Final = 2


def pieces(family: Metric) -> Iterator[bytes]:
    """Yield the text of a family, head first."""
    samples = family.samples
    for first in range(0, max(1, len(samples)), SAMPLES_AT_ONCE):
        some = Metric(family.name, family.documentation, family.type, family.unit)
        some.samples = samples[first : first + SAMPLES_AT_ONCE]
        text = generate_latest(_One(some))
        yield text.split(b"\n", _LINES_OF_HEAD)[-1] if first else text


class _One(CollectorRegistry):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        yield self._family
