"""`hvd-compress report`: a recorded run as one HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from . import console, doctor, options, run_log, savings
from .run_log import Columns, Run

_RANK_COLUMNS = ("step_ms", "exchange_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms", "memory_mb")
_BUCKET_COLUMNS = ("bytes", "ratio", "encode_ms", "wire_ms", "decode_ms", "relative_error", "residual_norm")
_MISSING = "–"  # noqa: RUF001 (an en dash)


def page(run: Run) -> str:
    """The HTML page of a run, with everything in it: no other file, no network."""
    with console.needed_by("report"):
        import jinja2

        from . import run_plots

        plots = run_plots.draw(run)
    templates = jinja2.PackageLoader("hvd_compress.tools")
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(loader=templates, autoescape=True, trim_blocks=True, undefined=strict)
    return environment.get_template("report.html").render(
        run=run,
        summary=doctor.summary(run),
        saved=savings.sentences(run),
        auto=savings.table(run),
        findings=doctor.examine(run),
        is_short=doctor.is_short(run),
        plots=plots,
        ranks=_rank_table(run),
        buckets=_bucket_table(run),
        settings=list(_settings(run.meta)),
    )


def _rank_table(run: Run) -> list[list[str]]:
    """A header and a row per rank: medians over the steps."""
    rows = [[f"rank {rank.number}", *_medians(rank.steps, _RANK_COLUMNS)] for rank in run.ranks]
    return [["median", *_RANK_COLUMNS], *rows]


def _bucket_table(run: Run) -> list[list[str]]:
    """A header and a row per bucket: its size, its compressors, and medians over the steps of the first rank."""
    sizes = {bucket["name"]: f"{bucket['nbytes'] / 1e6:.3g}" for bucket in run.meta.get("buckets", [])}
    rows = [
        [name, sizes.get(name, "0"), _compressors(columns["compressor"]), *_medians(columns, _BUCKET_COLUMNS)]
        for name, columns in run.first.buckets.items()
    ]
    return [["bucket", "MB", "compressor", *_BUCKET_COLUMNS], *rows]


def _medians(columns: Columns, names: tuple[str, ...]) -> list[str]:
    """Medians as text. The first known value is left out: it holds what compiling and connecting takes."""
    cells = []
    for name in names:
        known = columns[name][np.isfinite(columns[name])][1:]
        value = float(np.median(known)) if len(known) else None
        cells.append(_MISSING if value is None else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}")
    return cells


def _compressors(used: np.ndarray) -> str:
    """The compressors of a bucket, the most frequent one first, with their shares of the steps."""
    counts = Counter(sorted(used.tolist())).most_common()
    if len(counts) == 1:
        return str(used[0])
    return ", ".join(f"{name} ({count / len(used):.0%})" for name, count in counts)


def _settings(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What run.json says about the run: names and values; nested names are joined with spaces."""
    for key, value in fields.items():
        if not prefix and key in ("format", "buckets"):
            continue
        name = f"{prefix} {key.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            yield from _settings(value, name)
        else:
            yield name, _MISSING if value is None else str(value)


@click.command(epilog="Example: hvd-compress report logs/run-1 -o report.html")
@click.argument("run_dir")
@options.output("The page to write.", default="report.html", show_default=True)
@console.json_option
@np.errstate(all="ignore")  # as in `doctor`
def report(run_dir: str, output: Path, as_json: bool) -> None:
    """Make a self-contained HTML page of a run.

    RUN_DIR is the log_dir of hvdc.callbacks.CompressionMonitor or hvdc.profile. The page says what compression saved,
    and has plots, tables and what doctor finds.
    """
    run = run_log.load(run_dir)
    with console.working("drawing"):
        text = page(run)
    with console.writing(output):
        output.write_text(text, encoding="utf-8")
    if as_json:
        console.print_json({"run": run.path, "page": str(output), "findings": len(doctor.examine(run))})
    else:
        console.output().print(f"{output}: {len(text) / 1e3:.0f} kB", markup=False)
