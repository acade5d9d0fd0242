"""A step's exchange of gradients, as training makes it, ready to be timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..compressors.namespace import Compression
from ..engine.grouping import Shape
from ..engine.plan import Plan
from ..engine.settings import BUCKET_BYTES, Settings
from ..frontends.build import new_reducer


def gradients(shapes: Sequence[Shape], rank: int) -> list[np.ndarray]:
    """Heavy-tailed values of another magnitude in each layer, as gradients are; others on each rank."""
    random = np.random.default_rng(rank)
    return [
        (random.standard_t(4, shape) * 10 ** random.uniform(-4, -2)).astype(np.float32) for shape in shapes
    ]


def barrier() -> None:
    """Waits for all ranks."""
    hvd.allreduce(tf.zeros([1]), name="barrier").numpy()


def slowest(seconds: Any, name: str) -> np.ndarray:
    """Of each number that of the rank where it is largest."""
    values = tf.constant(np.asarray(seconds), tf.float64)
    return np.asarray(hvd.allreduce(values, op=hvd.Max, name=name))


class Method:
    """The exchange with one compressor, between hosts of several workers in one level, in two, or as it is predicted.

    Attributes:
        run: One step's exchange, residuals updated; returns the averaged gradients.
    """

    def __init__(
        self,
        spec: str,
        variables: Sequence[tf.Variable],
        bucket_bytes: int | None = None,
        hierarchical: bool | str = "auto",
    ) -> None:
        settings = Settings(
            Compression.parse(spec), bucket_bytes=bucket_bytes or BUCKET_BYTES, hierarchical=hierarchical
        )
        self._reducer = new_reducer(settings)
        self.run = tf.function(
            lambda: self._reducer([v.value() for v in variables], variables), autograph=False
        )

    @property
    def plan(self) -> Plan:
        """There after the first `run`."""
        return self._reducer.last_plan("the plan")

    @property
    def chunk(self) -> int:
        """Elements of the chunks that are encoded; 0 where nothing is."""
        shapes = [param_group.layout.shapes[0] for param_group in self.plan.layout.param_groups]
        return max((math.prod(shape) for shape in shapes), default=0)


def relative_error(reduced: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> float:
    """||reduced - exact|| / ||exact||."""
    lost = sum(
        float(np.sum(np.square(a.numpy() - b.numpy(), dtype=np.float64))) for a, b in zip(reduced, exact)
    )
    whole = sum(float(np.sum(np.square(b.numpy(), dtype=np.float64))) for b in exact)
    return float(np.sqrt(lost / whole)) if whole else 0.0
