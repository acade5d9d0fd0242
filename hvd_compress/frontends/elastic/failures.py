"""`hvdc.elastic.run`, and how a lost rank is told from any other error."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.mpi_ops import init, shutdown

# Of Horovod's operations, ours and its own, and of what carries them; not the user's paths in a traceback.
_WORDS = re.compile(r"horovod|hvdc_|gloo|nccl", re.IGNORECASE)
_PATHS = re.compile(r'File "[^"\n]*"')


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function of an elastic job, as `horovod.tensorflow.elastic.run`.

    The function is called again whenever ranks have left or joined; before, the state (its first argument) is
    brought to the same point on all ranks. A tf.function that reduces gradients must be made in it: it is traced for
    the ranks that there are. (Keras makes its own anew.)

    Horovod's own `run` knows a lost rank by the names of three of its operations, and returns None, as if training
    were over, when another one fails.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        with horovod_errors():
            return func(state, *args, **kwargs)

    wrapped: Callable[..., Any] = run_fn(wrapper, _reset)
    return wrapped


@contextlib.contextmanager
def horovod_errors() -> Iterator[None]:
    """Raises HorovodInternalError where an operation failed because of another rank; from it, Horovod recovers."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if not _WORDS.search(_PATHS.sub("", str(error))):
            raise
        raise HorovodInternalError(str(error)) from error


def _reset() -> None:
    shutdown()
    init()
