"""Which compressor to take, and up to which bandwidth: from forecasts, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import units
from .network import Network
from .prediction import Forecast

if TYPE_CHECKING:
    from .plan import Case

# So much more time is worth it if less of the gradient waits for later steps.
WORTH = 0.05
# What loses more of white noise than this is not advised: it sends little more than chance would.
_MOST_LOST = 0.95
_RATES = np.logspace(6, 12, 61)  # bits per second between which the best one is looked for
_BISECTIONS = 12


def best_of(forecasts: Sequence[Forecast]) -> Forecast:
    """Of those that take at most 5% longer than the fastest, the one that loses least; of equals the faster one.

    Those that lose over 95% of white noise do not count.
    """
    some = [each for each in forecasts if each.lost <= _MOST_LOST]
    fastest = min(each.step for each in some)
    near = [each for each in some if each.step <= fastest * (1.0 + WORTH)]
    return min(near, key=lambda each: (each.lost, each.step))


def ranges(at: Callable[[float], Sequence[Forecast]]) -> tuple[tuple[float | None, str], ...]:
    """Which compressor is the best one up to which rate, slowest links first; the last one has no limit.

    Args:
        at: The forecasts at a rate, bits per second.
    """

    def name(rate: float) -> str:
        return best_of(at(rate)).compressor

    names = [name(rate) for rate in _RATES]
    found: list[tuple[float | None, str]] = []
    for i, here in enumerate(names[:-1]):
        if names[i + 1] != here:
            low, high = float(_RATES[i]), float(_RATES[i + 1])
            for _ in range(_BISECTIONS):
                middle = (low * high) ** 0.5
                low, high = (middle, high) if name(middle) == here else (low, middle)
            found.append((low, here))
    return (*found, (None, names[-1]))


def stops_paying(found: Sequence[tuple[float | None, str]]) -> float | None:
    """The rate from which on no compression is the best one; None where it never is up to 1 Tbit/s."""
    if found[-1][1] != "none":
        return None
    return found[-2][0] if len(found) > 1 else 0.0


def of_case(case: Case, network: Network) -> list[str]:
    """What the table of a case comes to."""
    best, none, rate = case.best, case.none, units.show_rate(network.rate)
    fastest = min(case.forecasts, key=lambda each: each.step)
    if best is not none:
        line = (
            f"Take {best.compressor} at {rate}: a step of {units.show_seconds(best.step)} instead of "
            f"{units.show_seconds(none.step)}, {none.step / best.step:.2g} times as fast."
        )
    elif fastest is none:
        line = f"Do not compress at {rate}: nothing is faster."
    else:
        gain = 100 * (none.step / fastest.step - 1)
        line = f"Do not compress at {rate}: the fastest, {fastest.compressor}, would gain {gain:.1f}%."
    chosen = dict.fromkeys(spec for _, spec in case.auto.chosen if spec != "none") or ["none"]
    auto = f"auto would take {' and '.join(chosen)}: a step of {units.show_seconds(case.auto.step)}."
    return [line, _by_bandwidth(case.ranges), auto]


def _by_bandwidth(found: Sequence[tuple[float | None, str]]) -> str:
    parts = []
    for limit, spec in found:
        if limit is not None:
            parts.append(f"{spec} up to {units.show_rate(limit)}")
        else:
            parts.append(f"{spec} beyond" if parts else f"{spec} everywhere")
    limit = stops_paying(found)
    if limit is None:
        end = "Compression pays up to 1 Tbit/s and more."
    else:
        end = (
            f"Compression stops paying at {units.show_rate(limit)}." if limit else "Compression pays nowhere."
        )
    return f"Best by bandwidth: {', '.join(parts)}. {end}"
