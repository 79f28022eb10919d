"""Own what a metric is: its kind, its words and its labels, and the family that it is exposed as."""

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
    """What a metric does."""

    COUNTER = "counter"
    """It only grows, unless it says otherwise from the start of the control process; its name ends in _total."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric."""

    kind: Kind
    name: str
    """Without the prefix, and without what Prometheus puts behind it."""
    text: str
    labels: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """The name under which it is asked for."""
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
