"""Own how samples are put into the families of the catalogue; a name that is not in the catalogue fails at once."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvleased.metrics.catalogue import BY_NAME


class Part:
    """The families of one part of the metrics, in the order in which they are first named."""

    def __init__(self) -> None:
        """Start with no families."""
        self._families: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        """Go through the families."""
        return iter(self._families.values())

    def begin(self, *names: str) -> None:
        """Show metrics even if they get no samples."""
        for name in names:
            self._family(name)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add one sample of a counter or gauge; the labels are in the order of the catalogue."""
        family = self._family(name)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily), name
        family.add_metric(labels, value)

    def add_histogram(
        self,
        name: str,
        bounds: Sequence[float],
        counts: Sequence[int],
        seconds: float,
        *labels: str,
    ) -> None:
        """Add a histogram; `counts` has one number for each bound, and one more for values above the last bound."""
        family = self._family(name)
        assert isinstance(family, HistogramMetricFamily), name
        names = (*map(repr, bounds), "+Inf")
        family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), seconds)

    def _family(self, name: str) -> Metric:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = BY_NAME[name].family()
        return family
