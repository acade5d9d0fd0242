"""What `hvd-compress plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import advice, console, units
from .cases import Case
from .network import Network
from .workload import Workload

if TYPE_CHECKING:
    from rich.table import Table


def title(work: Workload, network: Network) -> str:
    """What is predicted: the model, the network and the times of a step."""
    link = f"{units.show_rate(network.rate)}, {units.show_seconds(network.latency)} per message"
    shape = "as measured" if network.measured is not None else network.shape
    if shape == "two-level":
        assert network.local is not None
        inside = f"{units.show_rate(8.0 / network.local.beta)}, {units.show_seconds(network.local.alpha)}"
        shape = f"hosts of {network.workers} workers (inside {inside})"
        shape += ", compressed between them" if network.hierarchical else ""
    elif shape == "fat-tree":
        leaves = f"leaves of {network.ranks_per_leaf} ranks"
        shape = f"fat tree, {leaves}, oversubscribed {network.oversubscription:g} times"
    times = f"backward pass {units.show_seconds(work.backward)}"
    if work.rest:
        times += f", rest of a step {units.show_seconds(work.rest)}"
    return f"{units.show_count(work.numel)} parameters; {link}; {shape}; {times}"


def table(case: Case) -> Table:
    """A row per compressor, and one for `auto`."""
    columns = [
        "compressor", "step", "speedup", "efficiency", "exchange", "not hidden", "sent per rank", "ratio", "loses",
    ]  # fmt: skip
    rows = []
    for forecast in (*case.forecasts, case.auto):
        ratio = forecast.plain / forecast.sent
        rows.append([
            forecast.compressor,
            units.show_seconds(forecast.step),
            f"{case.speedup(forecast):.2f}x",
            f"{case.efficiency(forecast):.0%}" if case.alone else "",
            units.show_seconds(forecast.exchange),
            units.show_seconds(forecast.exposed),
            units.show_bytes(forecast.sent),
            f"{ratio:,.0f}" if ratio > 100 else f"{ratio:.3g}",
            f"{100 * forecast.lost:.2g}%" if forecast.lost else "",
        ])  # fmt: skip
    return console.table(f"{case.ranks} ranks, predicted", columns, rows)


def advice_on(case: Case, network: Network) -> list[str]:
    """What the table of a case comes to, in sentences."""
    best, none, rate = case.best, case.none, units.show_rate(network.rate)
    fastest = min(case.forecasts, key=lambda forecast: forecast.step)
    if best is not none:
        line = (
            f"Take {best.compressor} at {rate}: a step of {units.show_seconds(best.step)} instead of "
            f"{units.show_seconds(none.step)}, {case.speedup(best):.2g} times as fast."
        )
    elif fastest is none:
        line = f"Do not compress at {rate}: nothing is faster."
    else:
        gain = 100 * (case.speedup(fastest) - 1)
        line = f"Do not compress at {rate}: the fastest, {fastest.compressor}, would gain {gain:.1f}%."
    chosen = dict.fromkeys(spec for _, spec in case.auto.chosen if spec != "none") or ["none"]
    auto = f"auto would take {' and '.join(chosen)}: a step of {units.show_seconds(case.auto.step)}."
    return [line, _by_bandwidth(case.ranges), auto]


def _by_bandwidth(ranges: advice.Ranges) -> str:
    *limited, (_, last) = ranges
    parts = [f"{spec} up to {units.show_rate(limit)}" for limit, spec in limited if limit]
    parts.append(f"{last} {'beyond' if parts else 'everywhere'}")
    limit = advice.stops_paying(ranges)
    if limit is None:
        end = "Compression pays up to 1 Tbit/s and more."
    elif limit:
        end = f"Compression stops paying at {units.show_rate(limit)}."
    else:
        end = "Compression pays nowhere."
    return f"Best by bandwidth: {', '.join(parts)}. {end}"


def source_of_kernels(calibration: Path | None, by_default: Sequence[str]) -> str:
    """Where the kernels' speeds come from.

    Args:
        calibration: The file that holds them.
        by_default: The compressors that it does not hold.
    """
    if calibration is None:
        return (
            "Kernels are those of one server core, not yours: measure them and the link with "
            "`horovodrun -np 2 hvd-compress calibrate -o link.json`, then add --calibration link.json."
        )
    others = f", but those of {', '.join(by_default)}, which are of another machine" if by_default else ""
    return f"Kernels are those of {calibration}{others}."
