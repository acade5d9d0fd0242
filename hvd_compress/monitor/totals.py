"""Sums over the measured steps of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from .steps import Steps


@dataclasses.dataclass
class Totals:
    """Sums over the measured steps of one plan, on this rank."""

    steps: int = 0
    bytes: float = 0.0  # sent by this rank
    uncompressed_bytes: float = 0.0  # that it would have sent without compression
    seconds: float = 0.0  # of all steps but the first one of each epoch, whose length is not known
    waited: float = 0.0  # seconds in these steps for which training waited for the exchange, see `Steps.exposed`

    def add(self, steps: Steps) -> None:
        """Adds the next steps."""
        timed = ~np.isnan(steps.seconds)
        self.steps += len(steps)
        self.bytes += float(steps.bytes.sum())
        self.uncompressed_bytes += float(steps.buckets.uncompressed_bytes.sum())
        self.seconds += float(steps.seconds[timed].sum())
        self.waited += float(steps.exposed[timed].sum())


# Of the sessions that have ended, by the plan's name.
measured: dict[str, Totals] = {}
