"""What `hvdc.sensitivity` found, as a table and as a policy."""

from __future__ import annotations

import dataclasses
import glob
import numbers
from typing import Union

from ..compressors import Compressor

Policy = dict[str, Union[str, Compressor]]


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variable suffers from one compressor.

    Attributes:
        path: The variable's path (Keras 3) or name (Keras 2). Variables that share it share the row.
        elements: Its size.
        compressor: The compressor.
        wire_bytes: What its gradient becomes, in bytes; uncompressed it has 4 an element.
        relative_error: ||g - c|| / ||g|| for its mean gradient g and the mean c of what was sent of it; 0
            for a gradient of zeros.
        loss_increase: How much higher the loss is than after the uncompressed step, as a share of that
            step's decrease: 0.03 says that 3% of the progress has not arrived yet. Negative where
            the compressed step was the better one, infinite where the loss is no longer finite.
    """

    path: str
    elements: int
    compressor: Compressor
    wire_bytes: int
    relative_error: float
    loss_increase: float


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What `hvdc.sensitivity` found; `print` it for a table.

    Attributes:
        rows: One for each variable and compressor, the most sensitive first.
        steps: Over how many steps gradients were compressed.
        learning_rate: Of the step that was compared.
        loss: On the held-out batches, before the step.
        decrease: Of that loss by the uncompressed step; above 0.
    """

    rows: tuple[Row, ...]
    steps: int
    learning_rate: float
    loss: float
    decrease: float

    def policy(self, tolerance: float = 0.03) -> Policy:
        """The compressor for each variable: of those that it tolerates, the one that sends fewest bytes.

        Args:
            tolerance: The largest `loss_increase`, for each variable by itself. Those of several variables
                add up, as long as they are small.

        Returns:
            Patterns (as of `fnmatch`) that match one variable's path each, and a compressor for each: its
            spec string, or the object if it is one of your own; "none" where no compressor is tolerated.
            Variables that are too small to be compressed have no entry.

        Raises:
            ValueError: `tolerance` is not a number from 0 on.
        """
        if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real) or not tolerance >= 0:
            raise ValueError(f"policy: tolerance must be a number from 0 on, got {tolerance!r}")
        chosen: Policy = {}
        fewest: dict[str, int] = {}
        for row in self.rows:
            pattern = glob.escape(row.path)
            chosen.setdefault(pattern, "none")
            if row.loss_increase <= tolerance and row.wire_bytes < fewest.get(row.path, 4 * row.elements):
                fewest[row.path] = row.wire_bytes
                own = not row.compressor.pure
                chosen[pattern] = row.compressor if own else row.compressor.spec
        return chosen

    def __str__(self) -> str:
        lines = [
            f"loss {self.loss:.4g}, lower by {self.decrease:.3g} after a step of learning rate "
            f"{self.learning_rate:.3g}; compressed over {self.steps} steps"
        ]
        header = ("variable", "elements", "compressor", "bytes", "gradient error", "loss increase")
        cells = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for row in cells:
            columns = [
                text.ljust(width) if i in (0, 2) else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths))
            ]
            lines.append("  ".join(columns).rstrip())
        if not self.rows:
            lines.append("(no variable is large enough to be compressed)")
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path,
        f"{row.elements:,}",
        row.compressor.spec,
        f"{row.wire_bytes:,}",
        f"{row.relative_error:.2%}",
        f"{row.loss_increase:.2%}",
    )
