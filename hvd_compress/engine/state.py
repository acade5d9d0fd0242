"""Gradients that share a compressor, and what a rank keeps of them from step to step."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from ..compressors import Compressor
from ..exchange.rows_gather import Table
from .packing import FlatPacking, PerTensorPacking


@dataclasses.dataclass
class GroupState:
    """What a rank keeps of a layout's chunks from step to step, in their shapes; never broadcast."""

    residuals: list[tf.Variable]  # of `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # float32; empty without momentum correction

    def part(self, chunks: range) -> GroupState:
        """The state of some of the chunks."""
        part = slice(chunks.start, chunks.stop)
        return GroupState(self.residuals[part], self.velocities[part])


@dataclasses.dataclass
class ParamGroup:
    """Gradients that share a compressor, as the chunks that it sees, and what is kept of these."""

    compressor: Compressor
    layout: FlatPacking | PerTensorPacking
    state: GroupState
    # Of `exchange.low_rank`, alike on all ranks: one variable for all matrices, or none.
    factors: list[tf.Variable]


@dataclasses.dataclass
class EmbeddingGroup(ParamGroup):
    """A variable whose gradient is IndexedSlices, and what is kept of its rows."""

    table: Table
