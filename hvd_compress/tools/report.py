"""`hvd-compress report`: a run as one page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from . import console, doctor
from .run_log import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 400  # of a line: more are not seen
_GRAY = "#808890"  # text and axes: readable on white and on black
_COLORS = ("#3b82d6", "#e0812b", "#2ca58d", "#c4508a", "#8a6fd1", "#a89a2c")

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c0392b; --good: #2c8a57; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: CanvasText; background: Canvas; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; }
figure svg { width: 100%; height: auto; } figcaption { font-size: .85rem; padding: 0 .5rem .25rem; }
.finding { border-left: 4px solid var(--bad); padding: .25rem 1rem; margin: 1rem 0; }
.healthy { border-left: 4px solid var(--good); padding: .25rem 1rem; }
"""


def page(run: Run) -> str:
    """The page, HTML with everything in it: no other file, no network."""
    found = doctor.examine(run)
    findings = "".join(
        f'<div class="finding"><strong>{_text(f.problem)}</strong><p>{_text(f.figures)}</p>'
        f"<p>{_text(f.advice)}</p></div>"
        for f in found
    )
    plots = "".join(
        f"<figure>{_svg(draw, run)}<figcaption>{_text(caption)}</figcaption></figure>"
        for caption, draw in _PLOTS
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hvd_compress: {_text(run.path)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_text(run.path)}</h1><p>{_text(doctor.summary(run))}</p>"
        f"<h2>Doctor</h2>{findings or (_SHORT if doctor.is_short(run) else _HEALTHY)}"
        f'<h2>Plots</h2><div class="plots">{plots}</div>'
        f"<h2>Ranks</h2>{_table(*_ranks(run))}"
        f"<h2>Buckets</h2>{_table(*_buckets(run))}"
        f"<h2>Run</h2>{_table(('', ''), _about(run))}"
        "</body></html>\n"
    )


_SHORT = '<p class="finding">Too few steps for most rules.</p>'
_HEALTHY = '<p class="healthy">Nothing found.</p>'


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if any(header) else ""
    return (
        f'<div class="table"><table>{head}<tbody>{"".join(row(r, "td") for r in rows)}</tbody></table></div>'
    )


def _median(values: np.ndarray) -> str:
    known = values[np.isfinite(values)][1:]
    if not len(known):
        return "–"  # noqa: RUF001 (an en dash)
    value = float(np.median(known))
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"


def _ranks(run: Run) -> tuple[Sequence[str], list[list[str]]]:
    columns = ("step_ms", "exchange_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms", "memory_mb")
    rows = [[f"rank {r.number}", *(_median(r.steps[c]) for c in columns)] for r in run.ranks]
    return ("median", *(c.replace("_", " ") for c in columns)), rows


def _buckets(run: Run) -> tuple[Sequence[str], list[list[str]]]:
    sizes = {b["name"]: b["nbytes"] for b in run.meta.get("buckets", [])}
    columns = ("bytes", "ratio", "encode_ms", "wire_ms", "decode_ms", "relative_error", "residual_norm")
    rows = []
    for name, values in run.first.buckets.items():
        used, counts = np.unique(values["compressor"], return_counts=True)
        compressors = ", ".join(
            f"{u} ({n / counts.sum():.0%})" if len(used) > 1 else str(u)
            for u, n in sorted(zip(used, counts), key=lambda pair: -pair[1])
        )
        rows.append(
            [name, f"{sizes.get(name, 0) / 1e6:.3g}", compressors, *(_median(values[c]) for c in columns)]
        )
    return ("bucket", "MB", "compressor", *(c.replace("_", " ") for c in columns)), rows


def _about(run: Run) -> list[list[str]]:
    def rows(prefix: str, value: Any) -> list[list[str]]:
        if isinstance(value, dict):
            return [row for key, inner in value.items() for row in rows(f"{prefix} {key}".strip(), inner)]
        return [[prefix.replace("_", " "), "–" if value is None else str(value)]]  # noqa: RUF001

    return rows("", {key: value for key, value in run.meta.items() if key not in ("format", "buckets")})


# Plots


def _svg(draw: Callable[[Axes, Run], None], run: Run) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_alpha(0.0)
    axes.patch.set_alpha(0.0)
    draw(axes, run)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(_GRAY)
    axes.tick_params(colors=_GRAY, labelsize=8)
    axes.xaxis.label.set_color(_GRAY)
    axes.yaxis.label.set_color(_GRAY)
    axes.grid(color=_GRAY, alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            fontsize=7, frameon=False, labelcolor=_GRAY, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4
        )  # fmt: skip
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Ids of several plots on one page must differ.
    own = re.sub(r"\W", "", draw.__name__)
    svg = re.sub(r'\bid="', f'id="{own}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{own}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _thin(
    x: np.ndarray, y: np.ndarray, function: Callable[..., Any] = np.median
) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points: the median of neighbours each, so that no line hides another."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= _POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _POINTS)
    return np.array([x[p][-1] for p in parts]), np.array([function(y[p]) for p in parts])


def _from_zero(axes: Axes, values: np.ndarray) -> None:
    """A few stalls must not make the rest flat."""
    known = values[np.isfinite(values)]
    if len(known):
        axes.set_ylim(0.0, max(1e-9, 1.15 * float(np.percentile(known, 99))))


def _whole(axes: Axes) -> None:
    top = float(axes.dataLim.ymax)
    axes.set_ylim(0.0, 1.08 * top if 0.0 < top < np.inf else 1.0)


def _loss(axes: Axes, run: Run) -> None:
    loss, step = run.losses, run.of_all("step")[0]
    axes.plot(*_thin(step, loss), color=_COLORS[0], lw=1.2)
    positive = loss[np.isfinite(loss)]
    if len(positive) and positive.min() > 0 and positive.max() > 50 * positive.min():
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")


def _time(axes: Axes, run: Run) -> None:
    for rank, color in zip(run.ranks, _COLORS):
        axes.plot(
            *_thin(rank.steps["step"], rank.steps["step_ms"]), color=color, lw=1, label=f"rank {rank.number}"
        )
    _from_zero(axes, run.first.steps["step_ms"])
    axes.set(xlabel="step", ylabel="ms per step")


def _parts(axes: Axes, run: Run) -> None:
    """What each rank's step is made of."""
    names = ("own work", "waiting for the exchange")
    left = np.zeros(len(run.ranks))
    own, wait = [], []
    for rank in run.ranks:
        step, exposed = rank.steps["step_ms"], rank.steps["exposed_ms"]
        known = np.isfinite(step) & np.isfinite(exposed)
        total = float(step[known][1:].mean()) if known.sum() > 1 else 0.0
        waiting = float(exposed[known][1:].mean()) if known.sum() > 1 else 0.0
        own.append(max(total - waiting, 0.0))
        wait.append(waiting)
    labels = [f"rank {rank.number}" for rank in run.ranks]
    for name, values, color in zip(names, (np.array(own), np.array(wait)), _COLORS):
        axes.barh(labels, values, left=left, color=color, label=name, height=0.6)
        left = left + values
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (mean)")


def _coding(axes: Axes, run: Run) -> None:
    steps = run.first.steps
    for name, color in zip(("encode_ms", "wire_ms", "decode_ms"), _COLORS):
        axes.plot(*_thin(steps["step"], steps[name]), color=color, lw=1, label=name[:-3])
    _from_zero(axes, np.concatenate([steps["wire_ms"], steps["encode_ms"]]))
    axes.set(xlabel="step", ylabel=f"ms per step, rank {run.first.number}")


def _ratio(axes: Axes, run: Run) -> None:
    steps = run.first.steps
    axes.plot(*_thin(steps["step"], steps["ratio"]), color=_COLORS[0], lw=1.2)
    _whole(axes)
    axes.set(xlabel="step", ylabel="compression ratio")


def _norms(axes: Axes, run: Run) -> None:
    steps = run.first.steps
    for name, color in zip(("residual_norm", "gradient_norm"), _COLORS):
        x, y = _thin(steps["step"], steps[name])
        axes.plot(x, y, color=color, lw=1, marker=".", ms=3, label=name.replace("_", " "))
    _whole(axes)
    axes.set(xlabel="step", ylabel=f"norm, rank {run.first.number}")


def _error(axes: Axes, run: Run) -> None:
    for (name, values), color in zip(run.first.buckets.items(), _COLORS * 100):
        if np.nanmax(np.nan_to_num(values["relative_error"]), initial=0.0) > 0.0:
            x, y = _thin(values["step"], values["relative_error"])
            axes.plot(
                x,
                y,
                color=color,
                lw=1,
                marker=".",
                ms=3,
                label=f"bucket {name}" if len(run.first.buckets) <= 8 else None,
            )
    _whole(axes)
    axes.set(xlabel="step", ylabel="relative error")


def _memory(axes: Axes, run: Run) -> None:
    for rank, color in zip(run.ranks, _COLORS):
        axes.plot(
            *_thin(rank.steps["step"], rank.steps["memory_mb"]),
            color=color,
            lw=1.2,
            label=f"rank {rank.number}",
        )
    _whole(axes)
    axes.set(xlabel="step", ylabel="memory, MB")


_PLOTS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("Loss of each step, mean over the ranks.", _loss),
    ("Time from the end of one step to the end of the next.", _time),
    ("What a step consists of. The slowest rank waits least.", _parts),
    ("The exchange of all buckets; what is hidden behind the backward pass is included.", _coding),
    ("Bytes without compression over bytes sent.", _ratio),
    ("What is owed (residual) and what comes in (gradient), where they were taken.", _norms),
    ("||x - C(x)|| / ||x|| of x = gradient + residual, by bucket.", _error),
    ("Resident memory.", _memory),
)


@click.command(epilog="Example: hvd-compress report logs/run-1 -o report.html")
@click.argument("run_dir")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), callback=console.output_file, default="report.html",
    show_default=True, help="The page to write.",
)  # fmt: skip
@console.json_option
def report(run_dir: str, output: Path, as_json: bool) -> None:
    """Make a self-contained HTML page of a run.

    RUN_DIR is the log_dir of hvdc.callbacks.CompressionMonitor or hvdc.profile. The page has plots, tables and what
    doctor finds.
    """
    run = doctor.load(run_dir)
    with console.working("drawing"):
        text = page(run)
    console.write(output, text)
    if as_json:
        console.print_json({"run": run.path, "page": str(output), "findings": len(doctor.examine(run))})
    else:
        console.output().print(f"{output}: {len(text) / 1e3:.0f} kB", markup=False)
