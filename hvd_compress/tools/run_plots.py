"""The plots of a recorded run, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .run_log import Columns, Run

_POINTS = 400  # of a line: a plot cannot show more
_GRAY = "#808890"  # text and axes: readable on white and on black
_STYLE: Any = {
    "axes.prop_cycle": "cycler(color=['#3b82d6', '#e0812b', '#2ca58d', '#c4508a', '#8a6fd1', '#a89a2c'])",
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": _GRAY, "axes.labelcolor": _GRAY,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _GRAY, "grid.alpha": 0.2,
    "xtick.color": _GRAY, "ytick.color": _GRAY, "xtick.labelsize": 8, "ytick.labelsize": 8, "lines.linewidth": 1.0,
    "text.parse_math": False, "lines.markersize": 3,
    "legend.fontsize": 7, "legend.frameon": False, "legend.labelcolor": _GRAY,
}  # fmt: skip
_COLORS = [  # of compressors
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan",
    "gold",
]  # fmt: skip
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def draw(run: Run) -> list[tuple[str, str]]:
    """All plots: a caption and an SVG element each."""
    plots = (*([_TIME_LINE] if _has_choices(run) else []), *_PLOTS, *([_ROUNDS] if run.rounds else []))
    return [(caption, _svg(plot, label, run)) for caption, label, plot in plots]


def _svg(plot: Callable[[Axes, Run], None], label: str, run: Run) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel="step", ylabel=label.format(rank=run.first.number))
        plot(axes, run)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    # Ids must be unique on a page with several plots.
    svg = re.sub(r'\bid="', f'id="{plot.__name__}-', svg[svg.index("<svg") :])
    return re.sub(r'(href="|url\()#', rf"\1#{plot.__name__}-", svg)


def _line(axes: Axes, columns: Columns, name: str, label: str | None = None, marker: str = "") -> None:
    """Draws the known values of a column, as medians of neighbors where there are too many."""
    step, values = columns["step"], columns[name]
    known = np.flatnonzero(np.isfinite(values))
    parts = np.array_split(known, min(_POINTS, len(known))) if len(known) else []
    medians = [np.median(values[part]) for part in parts]
    axes.plot([step[part[-1]] for part in parts], medians, label=label, marker=marker)


def _ranks(axes: Axes, run: Run, name: str) -> None:
    """Draws a line for each rank's column."""
    for rank in run.ranks:
        _line(axes, rank.steps, name, f"rank {rank.number}")


def _without_stalls(axes: Axes, values: np.ndarray) -> None:
    """Limits the y axis, so that a few stalls do not make all other values look flat."""
    known = values[np.isfinite(values)]
    if len(known):
        axes.set_ylim(0.0, max(1e-9, 1.15 * float(np.percentile(known, 99))))


def _from_zero(axes: Axes) -> None:
    top = float(axes.dataLim.ymax)
    axes.set_ylim(0.0, 1.08 * top if 0.0 < top < np.inf else 1.0)


def _loss(axes: Axes, run: Run) -> None:
    losses = run.losses
    _line(axes, {"step": run.of_all("step")[0], "loss": losses}, "loss")
    known = losses[np.isfinite(losses)]
    if len(known) and known.min() > 0 and known.max() > 50 * known.min():
        axes.set_yscale("log")


def _has_choices(run: Run) -> bool:
    """Whether some bucket got several compressors."""
    return any(len(set(columns["compressor"].tolist())) > 1 for columns in run.first.buckets.values())


def _choices(axes: Axes, run: Run) -> None:
    """Draws a bar for each run of steps with one compressor, and a mark for each trial."""
    colors: dict[str, str] = {}
    for y, columns in enumerate(run.first.buckets.values()):
        step, specs = columns["step"], columns["compressor"]
        begins = np.flatnonzero(np.concatenate([[True], specs[1:] != specs[:-1]]))
        ends = np.concatenate([begins[1:], [len(specs)]]) - 1
        for begin, end in zip(begins, ends):
            color = colors.setdefault(str(specs[begin]), _COLORS[len(colors) % len(_COLORS)])
            axes.barh(y, step[end] - step[begin] + 1.0, left=step[begin] - 0.5, height=0.7, color=color)
    for spec, color in colors.items():
        axes.barh(0, 0.0, color=color, label=spec)
    trials = run.first.steps["step"][run.trial]
    if len(trials):
        axes.plot(trials, np.full(len(trials), -0.6), linestyle="none", marker="v", color=_GRAY, label="trial")
    axes.set_yticks(range(len(run.first.buckets)), list(run.first.buckets))
    axes.invert_yaxis()
    axes.grid(False)


def _time(axes: Axes, run: Run) -> None:
    _ranks(axes, run, "step_ms")
    _without_stalls(axes, run.first.steps["step_ms"])


def _parts(axes: Axes, run: Run) -> None:
    own, waiting = [], []
    for rank in run.ranks:
        times = np.stack([rank.steps["step_ms"], rank.steps["exposed_ms"]])
        known = times[:, np.isfinite(times).all(0)][:, 1:]
        step, exposed = known.mean(1) if known.size else (0.0, 0.0)
        own.append(max(step - exposed, 0.0))
        waiting.append(exposed)
    labels = [f"rank {rank.number}" for rank in run.ranks]
    axes.barh(labels, own, label="own work", height=0.6)
    axes.barh(labels, waiting, left=own, label="waiting for the exchange", height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (mean)")


def _coding(axes: Axes, run: Run) -> None:
    steps = run.first.steps
    for name in ("encode", "wire", "decode"):
        _line(axes, steps, f"{name}_ms", name)
    _without_stalls(axes, np.concatenate([steps["wire_ms"], steps["encode_ms"]]))


def _ratio(axes: Axes, run: Run) -> None:
    _line(axes, run.first.steps, "ratio")
    _from_zero(axes)


def _norms(axes: Axes, run: Run) -> None:
    for name in ("residual", "gradient"):
        _line(axes, run.first.steps, f"{name}_norm", f"{name} norm", marker=".")
    _from_zero(axes)


def _error(axes: Axes, run: Run) -> None:
    buckets = run.first.buckets
    for name, columns in buckets.items():
        if np.nanmax(np.nan_to_num(columns["relative_error"]), initial=0.0) > 0.0:
            label = f"bucket {name}" if len(buckets) <= 8 else None
            _line(axes, columns, "relative_error", label, marker=".")
    _from_zero(axes)


def _rounds(axes: Axes, run: Run) -> None:
    names = {"movement": "movement", "drift": "drift between ranks", "outer_step": "outer step"}
    for name, label in names.items():
        _line(axes, run.rounds, name, label)
    _from_zero(axes)


def _memory(axes: Axes, run: Run) -> None:
    _ranks(axes, run, "memory_mb")
    _from_zero(axes)


_TIME_LINE = ("The compressor of each bucket in each step.", "bucket, rank {rank}", _choices)
_ROUNDS = (
    "What the weights moved in each round of local steps: root mean squares over the ranks.", "norm", _rounds
)  # fmt: skip
_PLOTS: tuple[tuple[str, str, Callable[[Axes, Run], None]], ...] = (
    ("Loss of each step, mean over the ranks.", "loss", _loss),
    ("Time from the end of one step to the end of the next.", "ms per step", _time),
    ("What a step consists of. The slowest rank waits least.", "", _parts),
    ("The exchange of all buckets; what is hidden behind the backward pass is included.",
     "ms per step, rank {rank}", _coding),
    ("Bytes without compression over bytes sent.", "compression ratio", _ratio),
    ("What is owed (residual) and what comes in (gradient), where they were taken.", "norm, rank {rank}", _norms),
    ("||x - C(x)|| / ||x|| of x = gradient + residual, by bucket.", "relative error", _error),
    ("Resident memory.", "memory, MB", _memory),
)  # fmt: skip
