"""Own the definition of a metric: its kind, its help text and its labels, and the family that it is exposed as."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

PREFIX: Final = "kvlease_"


class Kind(Enum):
    """The kind of a metric."""

    COUNTER = "counter"
    """It only grows, from the start of the control process unless its text says otherwise; its name ends in _total."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric."""

    kind: Kind
    name: str
    """The name without the prefix, and without the ending that Prometheus adds."""
    text: str
    labels: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """The name by which queries ask for the metric."""
        ending = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}[self.kind]
        return f"{PREFIX}{self.name}{ending}"

    def family(self) -> Metric:
        """Return a family without samples."""
        kinds = {
            Kind.COUNTER: CounterMetricFamily,
            Kind.GAUGE: GaugeMetricFamily,
            Kind.HISTOGRAM: HistogramMetricFamily,
        }
        family: Metric = kinds[self.kind](PREFIX + self.name, self.text, labels=self.labels)
        return family
