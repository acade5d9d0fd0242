"""Memory of the host between steps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform

import tensorflow as tf

# Parameters of mallopt in malloc.h. The values are the largest that glibc accepts (for the second, on 64 bits).
_SETTINGS = {
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: never return the end of the heap
    -3: 2**25,  # M_MMAP_THRESHOLD: take blocks of up to 32 MB from the heap
    -2: 2**26,  # M_TOP_PAD: keep the last heap of other threads
}


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep the memory that a step frees, if gradients are in the host's memory.

    By default, glibc returns large blocks to the kernel, which clears them page by page when the next step asks again:
    up to half of the exchange's time. With kept memory, the process stays as large as in its largest step. Nothing is
    changed if malloc's environment variables are set, or if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc" or tf.config.list_physical_devices("GPU"):
        return
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, value in _SETTINGS.items():
            libc.mallopt(parameter, value)
