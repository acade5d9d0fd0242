"""Every compressor's forecast between so many ranks, and how they compare."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import advice
from .network import Network
from .prediction import Forecast, forecast, forecast_auto
from .workload import Workload


@dataclasses.dataclass(frozen=True)
class Case:
    """All forecasts for a number of ranks.

    Attributes:
        ranks: The number of ranks.
        alone: Seconds of a step on a single rank.
        forecasts: A forecast per compressor; the first one is without compression.
        auto: What `auto` would do.
        ranges: Up to which rate (bits per second, None: any) which compressor is the best one.
    """

    ranks: int
    alone: float
    forecasts: tuple[Forecast, ...]
    auto: Forecast
    ranges: advice.Ranges

    @property
    def none(self) -> Forecast:
        """The forecast without compression."""
        return self.forecasts[0]

    @property
    def best(self) -> Forecast:
        """The one to take; see `advice.best_of`."""
        return advice.best_of(self.forecasts)

    def speedup(self, forecast: Forecast) -> float:
        """How many times as fast a step is as without compression."""
        return self.none.step / forecast.step

    def efficiency(self, forecast: Forecast) -> float:
        """The share of its speed alone that each rank keeps."""
        return self.alone / forecast.step if forecast.step else 1.0

    def as_json(self) -> dict[str, Any]:
        """For scripts; seconds, bytes, bits per second."""
        buckets = [{"bytes": nbytes, "compressor": spec} for nbytes, spec in self.auto.chosen]
        return {
            "ranks": self.ranks,
            "best": self.best.compressor,
            "compressors": [self._fields(forecast) for forecast in self.forecasts],
            "auto": {**self._fields(self.auto), "buckets": buckets},
            "best_by_bandwidth": [{"up_to": rate, "compressor": spec} for rate, spec in self.ranges],
            "stops_paying": advice.stops_paying(self.ranges),
        }

    def _fields(self, forecast: Forecast) -> dict[str, Any]:
        fields = dataclasses.asdict(forecast)
        del fields["chosen"]
        return {**fields, "speedup": self.speedup(forecast), "efficiency": self.efficiency(forecast)}


def case_of(work: Workload, network: Network, ranks: int, specs: tuple[str, ...]) -> Case:
    """All forecasts for so many ranks.

    Raises:
        ValueError: The network does not fit them.
    """

    def at(rate: float | None = None) -> tuple[Forecast, ...]:
        return tuple(forecast(spec, work, network, ranks, rate) for spec in specs)

    auto = forecast_auto(work, network, ranks)
    return Case(ranks, work.backward + work.rest, at(), auto, advice.ranges(at))
