"""The exchange of a step's gradients with one compressor, as in training, for `bench` and the benchmarks to time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import devices
from ..compressors.namespace import Compression
from ..engine.plan import Plan
from ..engine.settings import BUCKET_BYTES, Settings
from ..frontends.build import new_reducer

_T = TypeVar("_T")


def barrier() -> None:
    """Waits for all ranks."""
    hvd.allreduce(tf.zeros([1]), name="barrier").numpy()


def slowest(seconds: Any, name: str) -> np.ndarray:
    """The largest of the ranks' values, for each number."""
    values = tf.constant(np.asarray(seconds), tf.float64)
    return np.asarray(hvd.allreduce(values, op=hvd.Max, name=name))


def and_wait(function: Callable[[], _T]) -> Callable[[], _T]:
    """The same function; it returns once its results are computed, also on a GPU."""

    def run() -> _T:
        results = function()
        devices.wait()
        return results

    return run


class Method:
    """The exchange with one compressor: `run` does that of one step, and returns the averaged gradients."""

    def __init__(
        self,
        spec: str,
        variables: Sequence[tf.Variable],
        bucket_bytes: int | None = None,
        hierarchical: bool | str = "auto",
    ) -> None:
        size = bucket_bytes or BUCKET_BYTES
        settings = Settings(Compression.parse(spec), bucket_bytes=size, hierarchical=hierarchical)
        self._reducer = new_reducer(settings)
        reduce = tf.function(lambda: self._reducer([v.value() for v in variables], variables), autograph=False)
        self.run = and_wait(reduce)

    @property
    def plan(self) -> Plan:
        """How gradients are divided; known after the first `run`."""
        return self._reducer.last_plan("the plan")

    @property
    def chunk(self) -> int:
        """The number of elements of the largest chunk that is encoded; 0 if none is."""
        shapes = [param_group.layout.shapes[0] for param_group in self.plan.layout.param_groups]
        return max((math.prod(shape) for shape in shapes), default=0)


def relative_error(reduced: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> float:
    """||reduced - exact|| / ||exact||."""
    total = float(tf.linalg.global_norm(exact))
    lost = float(tf.linalg.global_norm([a - b for a, b in zip(reduced, exact)]))
    return lost / total if total else 0.0
