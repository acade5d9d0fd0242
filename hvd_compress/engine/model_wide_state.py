"""The gradients of all of `auto`'s buckets in their own shapes, for candidates that need these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from ..common import tracing
from ..compressors import Auto, PowerSGD
from ..exchange import factor_allreduce as low_rank
from .grouping import Bucket, Shape
from .packing import WholeTensors
from .state import Section


@dataclasses.dataclass
class WholeModel:
    """What candidates that see gradients whole need besides the residuals, which are those of the flat pieces.

    Attributes:
        layout: All gradients of the sections, one section after the other.
        sections: Those of `auto`.
        factors: Right factors, alike on all ranks; one variable for all matrices, by the candidate's position.
    """

    layout: WholeTensors
    sections: list[Section]
    factors: dict[int, tf.Variable]

    @property
    def shapes(self) -> list[Shape]:
        """Of the gradients."""
        return self.layout.shapes

    def split(self, tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Tensors in the order of `layout`, section by section."""
        left = list(tensors)
        counts = [len(section.layout.bucket.members) for section in self.sections]
        return [[left.pop(0) for _ in range(count)] for count in counts]


def of_sections(sections: Sequence[Section], name: str, device: str) -> WholeModel | None:
    """What the sections of `auto` need; None where no candidate sees gradients whole.

    Args:
        sections: Of a plan.
        name: With which the variables' names begin.
        device: Where they are.
    """
    mine = [section for section in sections if isinstance(section.compressor, Auto)]
    candidates = mine[0].compressor.candidates if mine else ()
    found = {c: each for c, each in enumerate(candidates) if isinstance(each, PowerSGD)}
    if not found:
        return None
    buckets = [section.layout.bucket for section in mine]
    members = tuple(i for bucket in buckets for i in bucket.members)
    layout = WholeTensors(Bucket(members, tuple(shape for bucket in buckets for shape in bucket.shapes)))
    with tf.device(device):
        factors = {
            c: tracing.variable(low_rank.start(each, layout.shapes), f"{name}_factors")
            for c, each in found.items()
        }
    return WholeModel(layout, mine, factors)
