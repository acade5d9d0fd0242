"""A process set of this process alone, for measurements in one process without `hvd.init()`."""

from __future__ import annotations

import horovod.tensorflow as hvd


class OneRank(hvd.ProcessSet):
    """The only rank is this process: collectives return what it sends (see `transfers`)."""

    def __init__(self) -> None:
        super().__init__([0])

    def size(self) -> int:
        """Always 1."""
        return 1

    def rank(self) -> int:
        """Always 0."""
        return 0

    def included(self) -> bool:
        """Always True."""
        return True
