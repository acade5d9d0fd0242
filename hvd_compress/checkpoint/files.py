"""The files of a residual checkpoint, and the order in which they are written and deleted.

    directory/save-00000007/rank-0-of-2.npz    one file per rank, written by that rank
                            rank-1-of-2.npz
                            manifest.json      written last, by rank 0; a save with it is complete

Each save has its own number, and files of a complete save are never written again. Each file is written under a
temporary name in the same folder, flushed to disk and renamed. So if a process is killed at any point, all
complete saves stay intact, and at most one incomplete save remains, which is never read.

Ranks may share the directory, or each rank may have one on its own disk. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from ..common.error_text import error_text

FORMAT = "hvd_compress residuals"
VERSION = 1
_MANIFEST = "manifest.json"
_SAVE = re.compile(r"save-(\d{8,})")
_OURS = re.compile(r"(manifest\.json|rank-\d+-of-\d+\.npz)(\.tmp)?")
_METADATA = "metadata"


class FormatError(ValueError):
    """A file is of another kind or version."""


def save_path(directory: str, number: int) -> str:
    """The path of the folder of a save."""
    return os.path.join(directory, f"save-{number:08d}")


def rank_path(directory: str, number: int, rank: int, ranks: int) -> str:
    """The path of the file of a rank."""
    return os.path.join(save_path(directory, number), f"rank-{rank}-of-{ranks}.npz")


def numbers(directory: str) -> list[int]:
    """The numbers of all saves, complete or not, in ascending order. Empty if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_SAVE.fullmatch, names) if match)


def next_number(directory: str) -> int:
    """A number that is larger than those of all saves in the directory."""
    return max(numbers(directory), default=0) + 1


def complete(directory: str) -> list[int]:
    """The numbers of the complete saves in ascending order. Only rank 0 is sure to see all manifests."""
    return [n for n in numbers(directory) if os.path.exists(os.path.join(save_path(directory, n), _MANIFEST))]


def write_rank(directory: str, number: int, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the file of rank `metadata["rank"]` of `metadata["ranks"]`, in a directory that may not exist yet.

    Metadata are values that JSON can represent. bfloat16 arrays are stored as uint16 with the same bits.
    """
    os.makedirs(save_path(directory, number), exist_ok=True)
    bfloat16 = [name for name, array in arrays.items() if array.dtype == tf.bfloat16.as_numpy_dtype]
    text = json.dumps({"format": FORMAT, "version": VERSION, **metadata, "bfloat16": bfloat16})
    members = {name: a.view(np.uint16) if name in bfloat16 else a for name, a in arrays.items()}
    members[_METADATA] = np.frombuffer(text.encode(), np.uint8)
    path = rank_path(directory, number, metadata["rank"], metadata["ranks"])
    _write(path, lambda file: np.savez(file, **members))  # type: ignore[arg-type]  # keywords of any name


def write_manifest(directory: str, number: int, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest, which completes the save. Call it on rank 0 after all ranks have written their files."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1)
    _write(os.path.join(save_path(directory, number), _MANIFEST), lambda file: file.write(text.encode()))
    _sync_directory(directory)


def read_manifest(directory: str, number: int) -> dict[str, Any]:
    """Reads what `write_manifest` wrote.

    Raises:
        ValueError: The file is missing, damaged, or of another format version.
    """
    path = os.path.join(save_path(directory, number), _MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({type(error).__name__})") from None
    manifest = _checked(manifest, path)
    if not {"save", "step", "ranks", "settings"} <= set(manifest):
        raise ValueError(f"{path} is damaged: entries are missing")
    step, ranks = manifest["step"], manifest["ranks"]
    is_valid = {
        "save": isinstance(manifest["save"], str),
        "step": isinstance(step, int) and 0 <= step < 2**63,
        "ranks": isinstance(ranks, int) and 1 <= ranks < 2**31,
        "settings": isinstance(manifest["settings"], dict),
    }
    for name, valid in is_valid.items():
        if not valid:
            raise ValueError(f"{path} is damaged: {name} is {error_text(manifest[name])}")
    return manifest


def _member(saved: Any, name: str, path: str) -> np.ndarray:
    """One array of an `.npz` file; reading it also checks its CRC."""
    if saved.zip.getinfo(f"{name}.npy").compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"{path} is damaged: {name} is compressed, as in no file of ours, and might fill the memory")
    array: np.ndarray = saved[name]
    return array


def read_rank(
    path: str, names: Callable[[dict[str, Any]], Collection[str]]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the metadata that `write_rank` wrote, and of the arrays those that `names(metadata)` returns.

    Arrays that the file does not have are left out.

    Raises:
        ValueError: The file is missing, damaged, or of another format version.
    """
    try:
        # NumPy leaves a damaged file open that it has opened itself.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            metadata = _checked(json.loads(_member(saved, _METADATA, path).tobytes()), path)
            expected = (name for name in names(metadata) if name in saved.files)
            arrays = {name: _member(saved, name, path) for name in expected}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except PermissionError:
        raise ValueError(f"{path} cannot be read: permission denied") from None
    except FormatError:
        raise
    except Exception as error:  # for damaged files, zipfile and NumPy raise many types of errors
        raise ValueError(f"{path} is damaged or cut short ({type(error).__name__})") from None
    bfloat16 = metadata.get("bfloat16")
    if not isinstance(bfloat16, list) or any(arrays[n].dtype != np.uint16 for n in arrays if n in bfloat16):
        raise ValueError(f"{path} is damaged: it does not say which arrays are of bfloat16")
    return metadata, {n: a.view(tf.bfloat16.as_numpy_dtype) if n in bfloat16 else a for n, a in arrays.items()}


def prune(directory: str, keep: Collection[int]) -> None:
    """Deletes all saves, complete or not, that are older than the newest of `keep` and not in `keep`.

    Files that cannot be deleted are ignored: ranks that share a directory all delete the same files.
    """
    for number in numbers(directory):
        if number in keep or number > max(keep):
            continue
        discard(directory, number)


def discard(directory: str, number: int) -> None:
    """Deletes one save, complete or not. Files that cannot be deleted are ignored, as in `prune`."""
    folder = save_path(directory, number)
    # The manifest first: without it, the remaining files are an incomplete save.
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder), key=lambda name: name != _MANIFEST):
            if _OURS.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _checked(metadata: Any, path: str) -> dict[str, Any]:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise FormatError(f"{path} is no file of {FORMAT}")
    if metadata.get("version") != VERSION:
        raise FormatError(
            f"{path} is of format version {error_text(metadata.get('version'))}, and this hvd_compress reads {VERSION}"
        )
    return metadata


def _write(path: str, write: Callable[[BinaryIO], Any]) -> None:
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    """Makes renames in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
