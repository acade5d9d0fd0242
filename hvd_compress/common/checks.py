"""What arguments may be, and errors that say so in one line, the same on every rank."""

from __future__ import annotations

import functools
import math
import numbers
import os
from collections.abc import Callable
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .error_text import error_text

# What Horovod's allreduce takes, but for bfloat16, which is summed as float32.
REDUCIBLE = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")

F = TypeVar("F", bound=Callable[..., Any])


def plain_errors(function: F) -> F:
    """Keeps the errors that `function` raises in one line inside of a tf.function, too.

    AutoGraph puts the whole traceback, with paths that differ from rank to rank, into an error's text.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            error.ag_pass_through = True  # type: ignore[union-attr]  # AutoGraph's own mark
            raise

    converted: F = tf.autograph.experimental.do_not_convert(wrapped)
    return converted


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float.

    Raises:
        ValueError: It is not a finite number from `low` to `high`.
    """
    wrong = isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real)
    if wrong or not math.isfinite(value) or not low <= value <= high:
        limits = f"a number from {low} to {high}" if low > -math.inf else "a finite number"
        raise ValueError(f"{name} must be {limits}, got {error_text(value)}")
    return float(value)


def integer(name: str, value: Any, low: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: It is not a whole number from `low` on.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name} must be a whole number from {low} on, got {error_text(value)}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool.

    Raises:
        ValueError: It is neither True nor False (nor 1 nor 0).
    """
    if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {error_text(value)}")
    return bool(value)


def text(name: str, value: Any) -> None:
    """Refuses what is neither a string nor None.

    Raises:
        TypeError: So it is.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {error_text(value)}")


def path(name: str, value: Any) -> str:
    """`value` as the path of a directory.

    Raises:
        TypeError: It is neither a string nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be the path of a directory, got {error_text(value)}")
    return os.fsdecode(value)


def process_set(value: Any) -> None:
    """Refuses what is no process set.

    Raises:
        TypeError: So it is.
    """
    if not isinstance(value, hvd.ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, got {error_text(value)}")


def is_horovods(value: Any) -> bool:
    """Whether Horovod's own `DistributedOptimizer` or `DistributedGradientTape` has made this."""
    # Of the name of the class that it wraps, but of Horovod's module.
    return type(value).__module__.partition(".")[0] == "horovod"


def registered(value: hvd.ProcessSet) -> None:
    """Refuses a process set that Horovod does not know.

    Raises:
        ValueError: So it is.
    """
    if value.process_set_id is None:
        raise ValueError(
            f"process_set of ranks {value.ranks} is not registered: pass it to "
            "hvd.init(process_sets=[...]) on all ranks"
        )


def reducible(what: str, dtype: tf.DType) -> None:
    """Refuses dtypes that Horovod cannot reduce.

    Raises:
        TypeError: `dtype` is one of these; `what` has it.
    """
    if dtype.is_complex:
        raise TypeError(
            f"{what} is {dtype.name}, and Horovod cannot reduce complex numbers: reduce the real and the imaginary part"
        )
    if dtype.name not in REDUCIBLE:
        raise TypeError(
            f"{what} is {dtype.name}, which Horovod cannot reduce: cast it to one of {', '.join(REDUCIBLE)}"
        )
