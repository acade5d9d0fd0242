"""Functions for NumPy arrays and tensors alike. Their array module `xp` is `numpy` or `tf.experimental.numpy`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def quotient(xp: Any, numerator: Any, denominator: Any) -> Any:
    """0 where the denominator is 0."""
    if xp is not np:
        return tf.math.divide_no_nan(numerator, denominator)
    is_zero = denominator == 0.0
    return np.where(is_zero, 0.0, numerator / np.where(is_zero, 1.0, denominator))


def cast(xp: Any, array: Any, dtype: type[np.generic]) -> Any:
    """The array with another dtype."""
    return np.asarray(array, dtype) if xp is np else tf.cast(array, dtype)
