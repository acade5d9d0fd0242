"""Gradients of real models, for measurements that need some of any shape. NumPy only.

`scripts/record_gradients.py` recorded them: of a small transformer on text, and of ResNet-20 on handwritten digits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..common import gradient_file
from ..engine.grouping import Shape

FILE = Path(__file__).with_name("data") / "gradients.npz"
# They were multiplied by this, for float16.
_SCALE = 1024.0


def gradients(shapes: Sequence[Shape], rank: int) -> list[np.ndarray]:
    """Gradients of these shapes, float32, different on each rank.

    Each is made of a recorded one with as many dimensions (of a matrix, if there is none): the largest is taken first,
    and after the smallest the largest again. It is repeated along each dimension until it fills the shape. So its
    values and their places, and the rank of a matrix, are those of real gradients. Rows and columns are scaled by
    random factors of 0.8 to 1.25, so that repeated values are not equal. Ranks take turns in two recorded batches.
    """
    steps = _recorded()
    kinds = steps[rank % len(steps)]
    random = np.random.default_rng(rank)
    used = dict.fromkeys(kinds, 0)
    result = []
    for shape in shapes:
        kind = len(shape) if len(shape) in kinds else 2
        source = kinds[kind][used[kind] % len(kinds[kind])]
        used[kind] += 1
        wanted = shape if len(shape) == kind else (math.prod(shape[:-1]), shape[-1] if shape else 1)
        result.append(_filled(source, wanted, random).reshape(shape))
    return result


def _filled(source: np.ndarray, shape: Shape, random: np.random.Generator) -> np.ndarray:
    """The array, repeated along each dimension, with a factor for each index of its first and its last dimension."""
    array = source[np.ix_(*(np.arange(size) % length for size, length in zip(shape, source.shape)))]
    for axis in {0, len(shape) - 1}:
        factors = np.exp(random.uniform(-0.22, 0.22, shape[axis])).astype(np.float32)
        array *= factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return array


@functools.cache
def _recorded() -> list[dict[int, list[np.ndarray]]]:
    """For each recorded batch, the gradients by their number of dimensions, the largest first."""
    steps = []
    for step in gradient_file.read(FILE):
        kinds: dict[int, list[np.ndarray]] = {}
        for array in sorted(step.values(), key=lambda array: array.size, reverse=True):
            kinds.setdefault(array.ndim, []).append(array.astype(np.float32) / _SCALE)
        steps.append(kinds)
    return steps
