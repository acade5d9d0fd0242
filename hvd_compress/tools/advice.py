"""Every compressor's forecast between so many ranks: which one is the best, and up to which bandwidth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import formats
from .network import Network
from .other_steps import OtherStep
from .prediction import Forecast, forecast, forecast_auto
from .workload import Workload

# Compressors, each with the rate (bits per second) up to which it is the best one; None: any rate.
Ranges = tuple[tuple["float | None", str], ...]

_RATES = np.logspace(6, 12, 61).tolist()  # bits per second at which compressors are compared
_BISECTIONS = 12
# Compression is advised if training is so many times as fast: predictions are no more accurate.
LEAST_SPEEDUP = 1.05


def best_of(forecasts: Sequence[Forecast]) -> Forecast:
    """The one to take: that with which training is the fastest, by what `auto` minimizes; of equals the first one.

    The first forecast is without compression. It is the one to take unless another one gains 5%.
    """
    fastest = min(forecasts, key=lambda forecast: forecast.per_progress)
    return fastest if fastest.per_progress * LEAST_SPEEDUP < forecasts[0].per_progress else forecasts[0]


def ranges(at: Callable[[float], Sequence[Forecast]]) -> Ranges:
    """Which compressor is the best one up to which rate, slowest links first; the last one has no limit.

    `at` returns the forecasts at a rate in bits per second.
    """

    def best_at(rate: float) -> str:
        return best_of(at(rate)).compressor

    limits: list[tuple[float | None, str]] = []
    names = [best_at(rate) for rate in _RATES]
    for low, high, name, next_name in zip(_RATES, _RATES[1:], names, names[1:]):
        if next_name != name:
            for _ in range(_BISECTIONS):
                middle = (low * high) ** 0.5
                low, high = (middle, high) if best_at(middle) == name else (low, middle)
            limits.append((low, name))
    return (*limits, (None, names[-1]))


def stops_paying(ranges: Ranges) -> float | None:
    """The rate from which on no compression is the best one; None where it never is up to 1 Tbit/s."""
    if ranges[-1][1] != "none":
        return None
    return ranges[-2][0] if len(ranges) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """All forecasts for a number of ranks."""

    ranks: int
    alone: float  # seconds of a step on a single rank
    forecasts: tuple[Forecast, ...]  # one per compressor; the first one is without compression
    auto: Forecast  # what `auto` would do
    ranges: Ranges

    @property
    def none(self) -> Forecast:
        """The forecast without compression."""
        return self.forecasts[0]

    @property
    def best(self) -> Forecast:
        """The one to take; see `best_of`."""
        return best_of(self.forecasts)

    @property
    def best_per_bucket(self) -> Forecast:
        """The best one of those that compress each bucket by itself, which a delay needs."""
        return best_of([each for each in self.forecasts if not formats.parse(each.compressor).model_wide])

    def speedup(self, forecast: Forecast) -> float:
        """How many times as fast a step is as without compression."""
        return self.none.step / forecast.step

    def training(self, forecast: Forecast | OtherStep) -> float:
        """How many times as fast training makes progress as without compression."""
        return self.none.per_progress / forecast.per_progress

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
            "stops_paying": stops_paying(self.ranges),
        }

    def _fields(self, forecast: Forecast) -> dict[str, Any]:
        fields = dataclasses.asdict(forecast)
        del fields["chosen"]
        return {
            **fields,
            "speedup": self.speedup(forecast),
            "training": self.training(forecast),
            "efficiency": self.efficiency(forecast),
        }


def case_of(work: Workload, network: Network, ranks: int, specs: tuple[str, ...]) -> Case:
    """All forecasts for so many ranks; ValueError if the network does not fit them."""

    def at(rate: float | None = None) -> tuple[Forecast, ...]:
        return tuple(forecast(spec, work, network, ranks, rate) for spec in specs)

    return Case(ranks, work.backward + work.rest, at(), forecast_auto(work, network, ranks), ranges(at))
