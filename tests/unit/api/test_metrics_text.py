"""Laws of the metrics' text in pieces: together they are what the library writes, wherever the text is cut."""

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from kvleased.metrics.exposition import SAMPLES_AT_ONCE, pieces


class OneFamily(CollectorRegistry):
    """A registry with one family."""

    def __init__(self, family: Metric) -> None:
        self._one = family

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        yield self._one


@pytest.mark.parametrize("num_samples", [0, 1, SAMPLES_AT_ONCE, 2 * SAMPLES_AT_ONCE + 1])
def test_pieces_are_what_the_library_writes(num_samples: int) -> None:
    """However a family is cut, its text is the same."""
    family = CounterMetricFamily("some", "Words.", labels=("label",))
    for number in range(num_samples):
        family.add_metric((f'"{number}\\\n',), number)

    assert b"".join(pieces(family)) == generate_latest(OneFamily(family))
