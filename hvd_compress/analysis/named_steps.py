"""The gradients that a user gives to `hvdc.compare`, in one form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import gradient_file
from ..common.error_text import error_text

_FORMS = "arrays, a list or a dict of arrays, a list of steps of these, or the path of an .npz file"


def named_steps(gradients: Any) -> list[dict[str, np.ndarray]]:
    """The arrays of each step by name, float32.

    Args:
        gradients: As in `hvdc.compare`. Arrays of a list are named by their positions.

    Raises:
        TypeError: It is nothing of this kind.
        ValueError: The file cannot be read, an array is not finite, or steps differ in their arrays.
    """
    if isinstance(gradients, (str, os.PathLike)):
        steps: list[Any] = list(gradient_file.read(gradients))
    elif _is_array(gradients):
        steps = [[gradients]]
    elif isinstance(gradients, Mapping):
        steps = [gradients]
    elif isinstance(gradients, Iterable):
        items = list(gradients)
        steps = [items] if any(map(_is_array, items)) else items
    else:
        raise TypeError(f"compare: gradients must be {_FORMS}, got {error_text(gradients)}")
    if not steps:
        raise ValueError("compare: gradients is empty")
    named = [_named(step, f" of step {i}" if len(steps) > 1 else "") for i, step in enumerate(steps)]
    shapes = [{name: array.shape for name, array in step.items()} for step in named]
    for i, of_step in enumerate(shapes):
        if of_step != shapes[0]:
            different = next(n for n in {**shapes[0], **of_step} if shapes[0].get(n) != of_step.get(n))
            raise ValueError(
                f"compare: all steps must have the same arrays, and {different!r} is {shapes[0].get(different)} in the "
                f"first and {of_step.get(different)} in step {i}"
            )
    return named


def _is_array(value: Any) -> bool:
    return isinstance(value, tf.IndexedSlices) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def _named(step: Any, where: str) -> dict[str, np.ndarray]:
    """The arrays of one step by name, float32; None, the gradient of a variable without one, is left out."""
    if isinstance(step, Mapping):
        pairs = [(str(name), value) for name, value in step.items()]
    elif isinstance(step, Iterable) and not isinstance(step, (str, bytes)) and not _is_array(step):
        pairs = [(str(i), value) for i, value in enumerate(step)]
    else:
        raise TypeError(f"compare: gradients must be {_FORMS}, got {error_text(step)}{where}")
    arrays = {name: _array(value, f"gradient {name!r}{where}") for name, value in pairs if value is not None}
    if not sum(array.size for array in arrays.values()):
        raise ValueError(f"compare: there are no gradients{where}")
    return arrays


def _array(value: Any, what: str) -> np.ndarray:
    if not _is_array(value):
        raise TypeError(f"compare: the {what} must be an array, got {error_text(value)}")
    tensor = value if isinstance(value, np.ndarray) else np.asarray(tf.convert_to_tensor(value))
    if not (np.issubdtype(tensor.dtype, np.floating) or tensor.dtype == tf.bfloat16.as_numpy_dtype):
        raise TypeError(f"compare: the {what} must hold floating point numbers, not {tensor.dtype}")
    with np.errstate(over="ignore"):
        array = np.asarray(tensor, np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"compare: the {what} holds infinities or NaN")
    return array
