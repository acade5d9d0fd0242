"""`hvdc.elastic.run`, and the detection of errors that a lost rank causes."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import threading
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow.mpi_ops import init, shutdown

from ...common.error_text import one_line
from ...common.verbosity import say
from ...exchange import connections

_LOST = (
    "an exchange failed ({}): a worker was lost, or its host did not answer for HOROVOD_GLOO_TIMEOUT_SECONDS. Training "
    "continues from the last commit with the workers that are left; if horovodrun ends instead, start it again from a "
    "checkpoint (horovod#3264). A host is used again only with horovodrun --blacklist-cooldown-range"
)

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
        try:
            with horovod_errors():
                return func(state, *args, **kwargs)
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            if isinstance(error, HorovodInternalError):
                say(_LOST.format(one_line(str(error))), "warning")
            _release_in_background(error)
            raise

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


def _release_in_background(error: BaseException) -> None:
    """Frees what the failed call of the training function held, in another thread.

    To destroy an iterator of a tf.data dataset may take up to a minute: it waits for the thread that tunes the dataset,
    which sleeps longer and longer, and may miss that it is cancelled (seen with TensorFlow 2.21; `CancellationManager`
    probably calls back before it notes that it is cancelled). TensorFlow does not hold the interpreter's lock
    meanwhile, so that training continues.
    """
    tracebacks = []
    seen: BaseException | None = error
    while seen is not None:
        tracebacks.append(seen.__traceback__)  # of the frames with what they hold
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__

    def release() -> None:
        tracebacks.clear()
        gc.collect()

    threading.Thread(target=release, name="hvd_compress release", daemon=True).start()


def _reset() -> None:
    shutdown()
    connections.connect(init)
