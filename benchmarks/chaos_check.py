"""Reads copies of saved residuals, as chaos.py made them, in a process of its own; prints what it read as JSON."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress.checkpoint import files, resume


def read(directory: Path) -> dict[str, Any]:
    """For each file of the newest save: its step, rank, size and the crc32 of its residuals, or why it is refused."""
    found: dict[str, Any] = {}
    for number in files.numbers(str(directory)):
        folder = Path(files.save_path(str(directory), number))
        for path in sorted(folder.glob("rank-*.npz")):
            try:
                manifest = files.read_manifest(str(directory), number)
                rank, size = int(path.stem.split("-")[1]), manifest["ranks"]
                states = resume.read(str(directory), number, manifest, rank, size, None)
            except ValueError as error:
                found[path.name] = {"refused": str(error)}
                continue
            checksum = 0
            for state in states:
                for residual in state.tensors.get("residuals", {}).values():
                    checksum = zlib.crc32(np.ascontiguousarray(residual).tobytes(), checksum)
            found[path.name] = {"step": manifest["step"], "rank": rank, "size": size, "residuals": checksum}
    return found


def main() -> None:
    print(json.dumps({name: read(Path(name)) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
