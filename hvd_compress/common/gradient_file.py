"""Files of recorded gradients: NumPy's `.npz` with an array "STEP/VARIABLE" for each step and variable.

    12/sequential/dense/kernel    the gradient of this variable in step 12

Any program can read them: `numpy.load(path)`. A file whose names do not begin with numbers, such as one written by
`numpy.savez(path, **gradients)`, holds a single step.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

_OF_STEP = re.compile(r"(\d+)/(.+)", re.DOTALL)


def append(path: str | os.PathLike, step: int, names: Sequence[str], gradients: Sequence[np.ndarray]) -> None:
    """Adds the gradients of one step to a file, which is created if it does not exist.

    Args:
        path: The file.
        step: The number of the step.
        names: The paths of the variables. Those that occur twice get `_1`, `_2`, ... at their ends.
        gradients: One array for each name; written as float32.

    Raises:
        OSError: The file cannot be written.
    """
    used: set[str] = set()
    with zipfile.ZipFile(path, "a") as archive:
        for name, gradient in zip(names, gradients):
            unique, count = name, 0
            while unique in used:
                count += 1
                unique = f"{name}_{count}"
            used.add(unique)
            with archive.open(f"{step}/{unique}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(gradient, np.float32), allow_pickle=False)


def read(path: str | os.PathLike) -> list[dict[str, np.ndarray]]:
    """The arrays of each step by their variables' paths, in the order of the steps.

    Raises:
        ValueError: There is no such file, it is not an `.npz` file, or it holds no arrays.
    """
    steps: dict[int, dict[str, np.ndarray]] = {}
    try:
        with open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise zipfile.BadZipFile
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                matches = [_OF_STEP.fullmatch(name) for name in file.files]
                for name, match in zip(file.files, matches):
                    step, variable = (int(match[1]), match[2]) if match and all(matches) else (0, name)
                    steps.setdefault(step, {})[variable] = file[name]
    except OSError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise ValueError(f"{os.fspath(path)} cannot be read: it is no .npz file of arrays, or it is damaged") from None
    if not steps:
        raise ValueError(f"{os.fspath(path)} holds no gradients")
    return [steps[step] for step in sorted(steps)]
