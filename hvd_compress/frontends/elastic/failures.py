"""`hvdc.elastic.run`, and the detection of errors that a lost rank causes."""

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

from ...exchange import connections

# Occur in errors of collectives, this package's and Horovod's own. They do not count in the paths of a traceback.
_WORDS = re.compile(r"horovod|hvdc_|gloo|nccl", re.IGNORECASE)
_PATHS = re.compile(r'File "[^"\n]*"')


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function of an elastic job, as `horovod.tensorflow.elastic.run` does.

    The function is called again whenever ranks have left or joined. Before each call, its first argument, the
    state, is synchronized across the ranks. Define a `tf.function` that reduces gradients inside the training
    function, because it is traced for the current ranks. (`fit` needs nothing: Keras creates a new one.)

    Horovod's own `run` recognizes a lost rank only by the names of three of its operations. If another operation
    fails, it returns None as if training had ended.

    Args:
        func: The training function. Its first argument is an elastic state, such as `hvdc.elastic.KerasState`.

    Returns:
        The decorated function, which takes the same arguments.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        with horovod_errors():
            return func(state, *args, **kwargs)

    wrapped: Callable[..., Any] = run_fn(wrapper, _reset)
    return wrapped


@contextlib.contextmanager
def horovod_errors() -> Iterator[None]:
    """Raises HorovodInternalError, from which Horovod recovers, if an operation failed because of another rank.

    The connections to the other ranks are then cut: they fail at once, too.
    """
    try:
        yield
    except HorovodInternalError:
        connections.cut()
        raise
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if not _WORDS.search(_PATHS.sub("", str(error))):
            raise
        connections.cut()
        raise HorovodInternalError(str(error)) from error


def _reset() -> None:
    shutdown()
    connections.connect(init)
