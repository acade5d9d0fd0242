"""Gradients that share a compressor, and what a rank keeps of them from step to step."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from ..compressors import Compressor
from ..exchange.rows_gather import Table
from .packing import FlatPieces, WholeTensors


@dataclasses.dataclass
class LayoutState:
    """What a rank keeps of a layout's pieces from step to step, in their shapes; never broadcast."""

    residuals: list[tf.Variable]  # of `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # float32; empty without momentum correction

    def part(self, pieces: range) -> LayoutState:
        """The state of some of the pieces."""
        part = slice(pieces.start, pieces.stop)
        return LayoutState(self.residuals[part], self.velocities[part])


@dataclasses.dataclass
class Section:
    """Gradients that share a compressor, as the pieces that it sees, and what is kept of these."""

    compressor: Compressor
    layout: FlatPieces | WholeTensors
    state: LayoutState
    # Of `exchange.low_rank`, alike on all ranks: one variable for all matrices, or none.
    factors: list[tf.Variable]


@dataclasses.dataclass
class TableSection(Section):
    """A variable whose gradient is IndexedSlices, and what is kept of its rows."""

    table: Table
