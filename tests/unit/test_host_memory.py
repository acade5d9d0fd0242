"""When glibc is told to keep freed memory."""

import ctypes
import os
import platform
import resource
import subprocess
import sys

import pytest
import tensorflow as tf

from hvd_compress.common import host_memory

_FREES_AND_TAKES = """
import resource
import sys
from hvd_compress.common import host_memory
if sys.argv[1] == "keep":
    host_memory.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [bytearray(2**22) for _ in range(50)]
del blocks
before = faults()
blocks = [bytearray(2**22) for _ in range(50)]
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_what_was_freed_needs_no_new_pages():
    environment = {name: v for name, v in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}

    def faults(what):
        command = [sys.executable, "-c", _FREES_AND_TAKES, what]
        return int(subprocess.check_output(command, env=environment, text=True, timeout=120))

    pages = 50 * 2**22 // resource.getpagesize()
    assert faults("keep") < pages / 20
    assert faults("default") > pages / 2


@pytest.mark.parametrize(
    "libc, gpus, environment, told",
    [
        ("glibc", [], {}, True),
        ("musl", [], {}, False),
        ("glibc", ["GPU:0"], {}, False),
        ("glibc", [], {"MALLOC_ARENA_MAX": "2"}, False),
        ("glibc", [], {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, False),
    ],
)
def test_only_where_it_helps_and_nobody_else_decided(monkeypatch, libc, gpus, environment, told):
    calls = []

    class Recorder:
        def __init__(self, name):
            assert name is None

        def mallopt(self, what, value):
            calls.append((what, value))

    monkeypatch.setattr(ctypes, "CDLL", Recorder)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host_memory.keep_freed_memory.__wrapped__()
    assert bool(calls) == told
