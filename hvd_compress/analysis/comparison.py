"""The result of `hvdc.compare`: a table, JSON, a plot, and the best compressor."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

from ..common import checks
from ..common.text_table import aligned

_DPI = 120


@dataclasses.dataclass(frozen=True)
class ComparedCompressor:
    """One compressor on the gradients that were compared.

    Errors are those of the gradients that are compressed, all together. With error feedback, x - C(x) of a step is sent
    later; `relative_error` does not show that, `error_with_residual` does.

    Attributes:
        compressor: The spec string.
        bytes: Bytes of one rank's payload, with the gradients that are too small to be compressed.
        ratio: Bytes of float32 divided by `bytes`.
        encode_ms: Milliseconds to encode all gradients, with the residual: the median of several calls.
        decode_ms: Milliseconds to decode one rank's payload: the median of several calls.
        mse: The mean of (C(x) - x)^2 over all elements, in the first step.
        relative_error: ||C(x) - x|| / ||x|| in the first step; 0 if x is 0.
        bias: ||E[C(x)] - x|| / ||x|| in the first step: the part of the error that no mean over random draws removes.
            For a compressor without randomness it is the relative error, for an unbiased one about 0.
        error_with_residual: ||c - g|| / ||g||, where c is the mean of what was sent in `Comparison.steps` steps, and g
            the mean of their gradients.
    """

    compressor: str
    bytes: int
    ratio: float
    encode_ms: float
    decode_ms: float
    mse: float
    relative_error: float
    bias: float
    error_with_residual: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `hvdc.compare`; `print` it for a table.

    Attributes:
        rows: One row for each compressor, in the order in which they were given.
        elements: Number of elements of all gradients of a step.
        compressed_elements: Number of those that are in gradients large enough to be compressed.
        steps: Number of steps of `error_with_residual`.
        recorded_steps: Number of steps that the gradients are from.
    """

    rows: tuple[ComparedCompressor, ...]
    elements: int
    compressed_elements: int
    steps: int
    recorded_steps: int

    def best(self, max_error: float | None = None, min_ratio: float | None = None) -> str:
        """The compressor that sends the fewest bytes within a limit of the error.

        Args:
            max_error: The largest acceptable `error_with_residual`. None for no limit: of all that reach `min_ratio`,
                the one with the smallest error is chosen.
            min_ratio: The smallest acceptable `ratio`; None for no limit.

        Returns:
            The spec string of the compressor, for `hvdc.DistributedOptimizer(compression=...)`.

        Raises:
            ValueError: Neither limit is given, a limit is not valid, or no compressor is within the limits.
        """
        if max_error is None and min_ratio is None:
            raise ValueError("best: give max_error, min_ratio or both")
        error = math.inf if max_error is None else checks.number("best: max_error", max_error, 0.0)
        ratio = 0.0 if min_ratio is None else checks.number("best: min_ratio", min_ratio, 0.0)
        small = [row for row in self.rows if row.error_with_residual <= error]
        fitting = [row for row in small if row.ratio >= ratio]
        if not fitting:
            least = min(row.error_with_residual for row in self.rows)
            most = max((row.ratio for row in small), default=0.0)
            found = f"the largest ratio is {most:.3g}" if small else f"the smallest error is {least:.3g}"
            limits = [f"an error of at most {max_error}"] if max_error is not None else []
            limits += [f"a ratio of at least {min_ratio}"] if min_ratio is not None else []
            raise ValueError(f"best: no compressor has {' and '.join(limits)}: {found}")
        if max_error is None:
            return min(fitting, key=lambda row: row.error_with_residual).compressor
        return min(fitting, key=lambda row: row.bytes).compressor

    def as_json(self) -> dict[str, object]:
        """The fields, in types that JSON can represent."""
        return {**dataclasses.asdict(self), "rows": [dataclasses.asdict(row) for row in self.rows]}

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes the fields as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the errors against the bytes: one step, and several steps with residual.

        Args:
            path: A file whose name ends in what matplotlib can draw, such as .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not know the format.
            OSError: The file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("Comparison.plot needs matplotlib: pip install 'hvd_compress[tools]'") from None
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.subplots()
        rows = [row for row in self.rows if row.relative_error > 0.0]  # the others have no place on a logarithmic axis
        sizes = [row.bytes / 1e6 for row in rows]
        errors = [row.error_with_residual for row in rows]
        axes.plot(sizes, [row.relative_error for row in rows], "o", color="gray", fillstyle="none", label="one step")
        axes.plot(sizes, errors, "o", color="tab:blue", label=f"mean of {self.steps} steps, with residual")
        for row, size, error in zip(rows, sizes, errors):
            axes.annotate(row.compressor, (size, error), (4, 4), textcoords="offset points", fontsize="x-small")
            axes.plot([size, size], [error, row.relative_error], color="gray", linewidth=0.5)
        axes.axvline(4e-6 * self.elements, color="gray", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="MB per step and rank (dotted: float32)", ylabel="relative error")
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
        figure.savefig(path, dpi=_DPI)

    def __str__(self) -> str:
        share = self.compressed_elements / self.elements
        title = f"{self.elements:,} elements ({share:.1%} of them large enough to be compressed), "
        title += f"{self.recorded_steps} recorded step{'s' * (self.recorded_steps > 1)}"
        header = ("compressor", "bytes", "ratio", "encode ms", "decode ms", "MSE", "error", "bias")
        cells = [(*header, f"error of {self.steps} steps")]
        cells += [
            (r.compressor, f"{r.bytes:,}", f"{r.ratio:.4g}", f"{r.encode_ms:.3g}", f"{r.decode_ms:.3g}", f"{r.mse:.3g}",
             f"{r.relative_error:.3g}", f"{r.bias:.3g}", f"{r.error_with_residual:.3g}")
            for r in self.rows
        ]  # fmt: skip
        return "\n".join([title, *aligned(cells)])
