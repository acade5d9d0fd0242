"""Checks of arguments.

Each check returns the value in its own type, or raises a ValueError (a TypeError if objects of such a type are never
valid). Errors are one line, and the same on every rank. `name` is what they call the argument.

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


def not_converted(function: F) -> F:
    """Keeps AutoGraph away from `function` and what it calls, in a user's tf.function.

    It would convert the source of each function that is called, which takes longer than tracing. And it would put the
    whole traceback, with paths that differ from rank to rank, into an error's text; errors stay in one line.
    """
    import tensorflow as tf

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            # AutoGraph's own mark, and that of Keras, which would add the arguments of its tf.cond.
            error.ag_pass_through = error._keras_call_info_injected = True  # type: ignore[union-attr]
            raise

    converted: F = tf.autograph.experimental.do_not_convert(wrapped)
    return converted


def is_number(value: Any) -> bool:
    """Whether this is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number from `low` to `high`, as a float."""
    if not is_number(value) or not math.isfinite(value) or not low <= value <= high:
        limits = f"a number from {low} to {high}" if low > -math.inf else "a finite number"
        raise ValueError(f"{name} must be {limits}, got {error_text(value)}")
    return float(value)


def integer_or_float(name: str, value: Any) -> float:
    """Returns a finite number. A whole number becomes an int: it is shorter in a spec string."""
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {error_text(value)}")
    return int(value) if float(value).is_integer() else float(value)


def ratio(name: str, value: Any) -> float:
    """A number above 0 and at most 1, as a float."""
    if not is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {error_text(value)}")
    return float(value)


def integer(name: str, value: Any, low: int, high: float = math.inf, limits: str = "") -> int:
    """An integer from `low` to `high`; `limits` says this in other words."""
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integral or not low <= value <= high:
        limits = limits or (f"{low} on" if high == math.inf else f"{low} to {high}")
        raise ValueError(f"{name} must be a whole number from {limits}, got {error_text(value)}")
    return int(value)


def seed(name: str, value: Any) -> int:
    """An integer of 32 bits."""
    return integer(name, value, -(2**31), 2**31 - 1, "-2**31 to 2**31 - 1")


def flag(name: str, value: Any) -> bool:
    """True or False (or 1 or 0), as a bool."""
    if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {error_text(value)}")
    return bool(value)


def true_or_false(name: str, value: Any) -> bool:
    """True or False, in a spec string."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {error_text(value)}")
    return value


def items(name: str, value: Any) -> list[Any]:
    """The items of anything that can be iterated over but a string, as a list."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, got {error_text(value)}")
    return list(value)


def text(name: str, value: Any) -> None:
    """A string or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {error_text(value)}")


def path(name: str, value: Any, kind: str = "directory") -> str:
    """The path of a directory or file, a string or an object with a path, as a string."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be the path of a {kind}, got {error_text(value)}")
    return os.fsdecode(value)


def process_set(value: Any) -> None:
    """A process set."""
    import horovod.tensorflow as hvd

    if not isinstance(value, hvd.ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, got {error_text(value)}")


def is_horovods(value: Any) -> bool:
    """Whether Horovod's own `DistributedOptimizer` or `DistributedGradientTape` made this."""
    # Its class has the name of the wrapped class, but Horovod's module.
    return type(value).__module__.partition(".")[0] == "horovod"


def registered(value: hvd.ProcessSet) -> None:
    """A process set that Horovod knows."""
    if value.process_set_id is None:
        raise ValueError(
            f"process_set of ranks {value.ranks} is not registered: pass it to "
            "hvd.init(process_sets=[...]) on all ranks"
        )


def reducible(what: str, dtype: tf.DType) -> None:
    """The dtype of `what`, which Horovod must be able to reduce."""
    if dtype.is_complex:
        raise TypeError(
            f"{what} is {dtype.name}, and Horovod cannot reduce complex numbers: reduce the real and the imaginary part"
        )
    if dtype.name not in REDUCIBLE:
        raise TypeError(
            f"{what} is {dtype.name}, which Horovod cannot reduce: cast it to one of {', '.join(REDUCIBLE)}"
        )
