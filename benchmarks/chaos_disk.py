"""The disk of the checkpoints of chaos.py: a small file system in memory, which can be filled up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FILLER = "filler"


@contextlib.contextmanager
def disk(megabytes: int) -> Iterator[Path]:
    """A file system of this size; it is removed at the end, even if this process is killed."""
    folder = tempfile.mkdtemp(prefix="chaos-disk-")
    # Waits for the end of this process, in whatever way it ends. Its own session keeps it from Ctrl-C.
    remove = 'cat > /dev/null; umount -l "$0"; rmdir "$0"'
    cleaner = subprocess.Popen(["sh", "-c", remove, folder], stdin=subprocess.PIPE, start_new_session=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "chaos", folder], check=True)
        yield Path(folder)
    finally:
        cleaner.communicate()


def fill(folder: Path) -> None:
    """Leaves no room on the disk."""
    with open(folder / _FILLER, "wb") as file, contextlib.suppress(OSError):
        while True:
            free = os.statvfs(folder)
            size = max(free.f_bavail * free.f_frsize, free.f_frsize)
            os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)


def clear(folder: Path) -> None:
    """Makes room again."""
    (folder / _FILLER).unlink(missing_ok=True)


def newest_save(folder: Path) -> Path | None:
    """The folder of the newest complete save of residuals."""
    saves = sorted(path.parent for path in (folder / "residuals").glob("save-*/manifest.json"))
    return saves[-1] if saves else None


def copy_save(save: Path, to: Path) -> None:
    """Copies one save into a directory of its own, in which it is the only one."""
    shutil.copytree(save, to / save.name)
