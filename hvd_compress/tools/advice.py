"""Which compressor is the best one, and up to which bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .prediction import Forecast

# Compressors, each with the rate (bits per second) up to which it is the best one; None: any rate.
Ranges = tuple[tuple["float | None", str], ...]

# A step may take so much longer, as a share, if less of the gradient waits for later steps.
WORTH = 0.05
# A compressor that loses more of white noise than this is not advised: it sends little more than chance would.
_MOST_LOST = 0.95
_RATES = np.logspace(6, 12, 61).tolist()  # bits per second at which compressors are compared
_BISECTIONS = 12


def best_of(forecasts: Sequence[Forecast]) -> Forecast:
    """Of those that take at most 5% longer than the fastest, the one that loses least; of equals the faster one.

    Those that lose over 95% of white noise do not count.
    """
    eligible = [forecast for forecast in forecasts if forecast.lost <= _MOST_LOST]
    longest = min(forecast.step for forecast in eligible) * (1.0 + WORTH)
    fast = [forecast for forecast in eligible if forecast.step <= longest]
    return min(fast, key=lambda forecast: (forecast.lost, forecast.step))


def ranges(at: Callable[[float], Sequence[Forecast]]) -> Ranges:
    """Which compressor is the best one up to which rate, slowest links first; the last one has no limit.

    Args:
        at: The forecasts at a rate, bits per second.
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
