"""A limit to the time that Horovod takes to connect the ranks of an elastic job.

A worker that loses its network while Horovod connects it to the others may wait there for ever. `horovodrun` takes it
for alive and starts no other one, so the whole job waits.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from ..common.verbosity import say


def limit() -> float:
    """Seconds: as long as `horovodrun` waits for hosts, and as two connections take at most."""
    elastic, gloo = (os.environ.get(f"HOROVOD_{name}", "") for name in ("ELASTIC_TIMEOUT", "GLOO_TIMEOUT_SECONDS"))
    return float(elastic or 600) + 2 * float(gloo or 30)


@contextlib.contextmanager
def ends_process_after(seconds: float) -> Iterator[None]:
    """Ends this process with status 1 if what is inside takes longer; an exception could not interrupt Horovod."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            say(
                f"Horovod has not connected this worker within {seconds:g} s: it ends, so that horovodrun can start "
                "another one; look at the network of this host, or raise HOROVOD_ELASTIC_TIMEOUT",
                "error",
            )
            os._exit(1)

    threading.Thread(target=watch, name="hvd_compress bounded", daemon=True).start()
    try:
        yield
    finally:
        done.set()
