"""Checks of arguments. Errors are one line, and the same on every rank.

TensorFlow and Horovod are loaded only by the checks that need them: sizes are predicted without them.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .error_text import error_text

if TYPE_CHECKING:
    import horovod.tensorflow as hvd
    import tensorflow as tf

# Dtypes that Horovod's allreduce takes, and bfloat16, which is summed as float32.
REDUCIBLE = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")

F = TypeVar("F", bound=Callable[..., Any])


def plain_errors(function: F) -> F:
    """Keeps the errors that `function` raises in one line, inside a tf.function too.

    AutoGraph puts the whole traceback, with paths that differ from rank to rank, into an error's text.
    """
    import tensorflow as tf

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            error.ag_pass_through = True  # type: ignore[union-attr]  # AutoGraph's own mark
            raise

    converted: F = tf.autograph.experimental.do_not_convert(wrapped)
    return converted


def is_number(value: Any) -> bool:
    """Whether this is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float.

    Raises:
        ValueError: It is not a finite number from `low` to `high`.
    """
    if not is_number(value) or not math.isfinite(value) or not low <= value <= high:
        limits = f"a number from {low} to {high}" if low > -math.inf else "a finite number"
        raise ValueError(f"{name} must be {limits}, got {error_text(value)}")
    return float(value)


def integer_or_float(name: str, value: Any) -> float:
    """`value` as an int if it is whole, which is shorter in a spec string, else as a float.

    Raises:
        ValueError: It is not a finite number.
    """
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {error_text(value)}")
    return int(value) if float(value).is_integer() else float(value)


def ratio(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ValueError: It is not a number above 0 and at most 1.
    """
    if not is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {error_text(value)}")
    return float(value)


def integer(name: str, value: Any, low: int, high: float = math.inf, limits: str = "") -> int:
    """`value` as an int.

    Args:
        name: What the error calls it.
        value: Any object.
        low: The smallest value.
        high: The largest value.
        limits: Both in the error's words; empty for the numbers themselves.

    Raises:
        ValueError: It is not a whole number from `low` to `high`.
    """
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integral or not low <= value <= high:
        limits = limits or (f"{low} on" if high == math.inf else f"{low} to {high}")
        raise ValueError(f"{name} must be a whole number from {limits}, got {error_text(value)}")
    return int(value)


def seed(name: str, value: Any) -> int:
    """`value` as an int.

    Raises:
        ValueError: It is not a whole number of 32 bits.
    """
    return integer(name, value, -(2**31), 2**31 - 1, "-2**31 to 2**31 - 1")


def flag(name: str, value: Any) -> bool:
    """`value` as a bool.

    Raises:
        ValueError: It is neither True nor False (nor 1 nor 0).
    """
    if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {error_text(value)}")
    return bool(value)


def true_or_false(name: str, value: Any) -> bool:
    """`value`, an argument in a spec string.

    Raises:
        ValueError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {error_text(value)}")
    return value


def items(name: str, value: Any) -> list[Any]:
    """The items of `value`.

    Raises:
        ValueError: It is a string, or cannot be iterated over.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, got {error_text(value)}")
    return list(value)


def text(name: str, value: Any) -> None:
    """Refuses what is neither a string nor None.

    Raises:
        TypeError: `value` is neither.
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
    """Refuses what is not a process set.

    Raises:
        TypeError: `value` is none.
    """
    import horovod.tensorflow as hvd

    if not isinstance(value, hvd.ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, got {error_text(value)}")


def is_horovods(value: Any) -> bool:
    """Whether Horovod's own `DistributedOptimizer` or `DistributedGradientTape` made this."""
    # Its class has the name of the wrapped class, but Horovod's module.
    return type(value).__module__.partition(".")[0] == "horovod"


def registered(value: hvd.ProcessSet) -> None:
    """Refuses a process set that Horovod does not know.

    Raises:
        ValueError: `value` is not registered.
    """
    if value.process_set_id is None:
        raise ValueError(
            f"process_set of ranks {value.ranks} is not registered: pass it to "
            "hvd.init(process_sets=[...]) on all ranks"
        )


def reducible(what: str, dtype: tf.DType) -> None:
    """Refuses dtypes that Horovod cannot reduce.

    Args:
        what: What has this dtype, in the error's words.
        dtype: The dtype.

    Raises:
        TypeError: Horovod cannot reduce `dtype`.
    """
    if dtype.is_complex:
        raise TypeError(
            f"{what} is {dtype.name}, and Horovod cannot reduce complex numbers: reduce the real and the imaginary part"
        )
    if dtype.name not in REDUCIBLE:
        raise TypeError(
            f"{what} is {dtype.name}, which Horovod cannot reduce: cast it to one of {', '.join(REDUCIBLE)}"
        )
