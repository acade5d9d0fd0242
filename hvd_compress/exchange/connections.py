"""How Horovod connects the ranks of an elastic job again and again, and how a rank cuts its connections after an error.

Horovod 0.28 leaves two gaps:

- A worker that is lost while Horovod connects the ranks ends all others with an uncaught exception. If Horovod was
  built by `hvd-compress` (`install.recipe`), its `init` fails instead, and may be called again with new ranks.
- When a rank is lost later, only the ranks that exchange data with it see that at once. They keep their own connections
  open while they shut down, so that the other ranks wait for HOROVOD_GLOO_TIMEOUT_SECONDS.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from horovod.tensorflow.mpi_ops import shutdown

from ..common.verbosity import say

_ATTEMPTS = 5
_opened: set[int] = set()  # the inodes of the sockets that Horovod has opened in `connect`


def connect(init: Callable[[], None]) -> None:
    """Calls Horovod's `init`, again if a rank is lost meanwhile.

    Raises:
        ValueError: Horovod could not connect the ranks, several times.
    """
    before = set(_sockets())
    for left in reversed(range(_ATTEMPTS)):
        try:
            init()
            break
        except ValueError as error:
            if not left or "initialization failed" not in str(error):
                raise
            say("a rank was lost while Horovod connected the ranks: those that are left are connected", "warning")
            shutdown()
    _opened.clear()
    _opened.update(set(_sockets()) - before)


def cut() -> None:
    """Cuts the connections to the other ranks, which then see at once that something is wrong.

    Horovod must be shut down afterwards. Does nothing where Horovod was not initialized by `connect`, and on systems
    without /proc.
    """
    for inode, descriptor in _sockets().items():
        if inode not in _opened:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # Another thread may have closed it, and opened something else in its place.
            if os.fstat(connection.fileno()).st_ino == inode:
                connection.shutdown(socket.SHUT_RDWR)
    _opened.clear()


def _sockets() -> dict[int, int]:
    """The descriptors of this process's sockets, by their inodes."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found[os.fstat(int(name)).st_ino] = int(name)
    return found
