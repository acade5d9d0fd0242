"""The gradients of all of `auto`'s buckets in their own shapes, for candidates that need these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from ..common import tracing
from .grouping import Shape, TensorGroup
from .packing import PerTensorPacking
from .state import ParamGroup


@dataclasses.dataclass
class ModelWide:
    """What candidates that see gradients whole need besides the residuals, which are those of the flat chunks.

    Attributes:
        layout: All gradients of the param_groups, one param_group after the other.
        param_groups: Those of `auto`.
        factors: Right factors, alike on all ranks; one variable for all matrices, by the candidate's position.
    """

    layout: PerTensorPacking
    param_groups: list[ParamGroup]
    factors: dict[int, tf.Variable]

    @property
    def shapes(self) -> list[Shape]:
        """Of the gradients."""
        return self.layout.shapes

    def split(self, tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Tensors in the order of `layout`, param_group by param_group."""
        left = list(tensors)
        counts = [len(param_group.layout.tensors.members) for param_group in self.param_groups]
        return [[left.pop(0) for _ in range(count)] for count in counts]


def of_sections(param_groups: Sequence[ParamGroup], name: str, device: str) -> ModelWide | None:
    """What the param_groups of `auto` need; None where no candidate sees gradients whole.

    Args:
        param_groups: Of a plan.
        name: With which the variables' names begin.
        device: Where they are.
    """
    mine = [param_group for param_group in param_groups if param_group.compressor.automatic]
    candidates = mine[0].compressor.candidates if mine else ()
    found = {c: each for c, each in enumerate(candidates) if each.model_wide}
    if not found:
        return None
    buckets = [param_group.layout.tensors for param_group in mine]
    members = tuple(i for bucket in buckets for i in bucket.members)
    layout = PerTensorPacking(
        TensorGroup(members, tuple(shape for bucket in buckets for shape in bucket.shapes))
    )
    with tf.device(device):
        factors = {
            c: tracing.variable(each.initial_factors(layout.shapes), f"{name}_factors")
            for c, each in found.items()
        }
    return ModelWide(layout, mine, factors)
