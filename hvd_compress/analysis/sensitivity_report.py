"""The result of `hvdc.sensitivity`, as a table and as a policy."""

from __future__ import annotations

import dataclasses
import glob
from typing import Union

from ..common import checks
from ..common.text_table import aligned
from ..compressors import Compressor

Policy = dict[str, Union[str, Compressor]]


@dataclasses.dataclass(frozen=True)
class Row:
    """The effect of one compressor on one variable.

    Attributes:
        path: Path (Keras 3) or name (Keras 2) of the variable. Variables with the same path share a row.
        elements: Number of elements of the variable.
        compressor: The compressor.
        wire_bytes: Bytes of the compressed gradient. Uncompressed, each element has 4 bytes.
        relative_error: ||g - c|| / ||g||, where g is the mean gradient and c is the mean of what was sent; 0 if g is 0.
        loss_increase: How much higher the loss is than after the uncompressed step, relative to the decrease by that
            step: 0.03 means that 3% of the progress is missing. Negative if the loss is lower; infinite if it is not
            finite.
    """

    path: str
    elements: int
    compressor: Compressor
    wire_bytes: int
    relative_error: float
    loss_increase: float


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of `hvdc.sensitivity`; `print` it for a table.

    Attributes:
        rows: One row for each variable and compressor, sorted by `loss_increase`, the largest first.
        steps: Number of steps over which gradients were compressed.
        learning_rate: Learning rate of the step whose losses were compared.
        loss: Loss on the held-out batches before the step.
        decrease: Decrease of that loss by the uncompressed step; above 0.
    """

    rows: tuple[Row, ...]
    steps: int
    learning_rate: float
    loss: float
    decrease: float

    def policy(self, tolerance: float = 0.03) -> Policy:
        """Chooses for each variable, among the compressors that it tolerates, the one that sends the fewest bytes.

        Args:
            tolerance: The largest acceptable `loss_increase` of each variable by itself. Small increases of several
                variables add up.

        Returns:
            A dictionary for the argument `policy` of `hvdc.DistributedOptimizer`. A key is a pattern (as in `fnmatch`)
            that matches the path of one variable. A value is a spec string, or the compressor itself if it is
            written by a user, or "none" if no compressor is tolerated. Variables that are too small to be
            compressed have no entry.

        Raises:
            ValueError: `tolerance` is not a number from 0 on.
        """
        if not checks.is_number(tolerance) or not tolerance >= 0:
            raise ValueError(f"policy: tolerance must be a number from 0 on, got {tolerance!r}")
        chosen: Policy = {}
        fewest: dict[str, int] = {}
        for row in self.rows:
            pattern = glob.escape(row.path)
            chosen.setdefault(pattern, "none")
            if row.loss_increase <= tolerance and row.wire_bytes < fewest.get(row.path, 4 * row.elements):
                fewest[row.path] = row.wire_bytes
                chosen[pattern] = row.compressor.spec if row.compressor.pure else row.compressor
        return chosen

    def __str__(self) -> str:
        lines = [
            f"loss {self.loss:.4g}, lower by {self.decrease:.3g} after a step of learning rate "
            f"{self.learning_rate:.3g}; compressed over {self.steps} steps"
        ]
        header = ("variable", "elements", "compressor", "bytes", "gradient error", "loss increase")
        cells = [header]
        cells += [
            (r.path, f"{r.elements:,}", r.compressor.spec, f"{r.wire_bytes:,}", f"{r.relative_error:.2%}",
             f"{r.loss_increase:.2%}")
            for r in self.rows
        ]  # fmt: skip
        lines += aligned(cells, left=(0, 2))
        if not self.rows:
            lines.append("(no variable is large enough to be compressed)")
        return "\n".join(lines)
