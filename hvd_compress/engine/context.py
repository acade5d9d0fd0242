"""What all parts of a step's graph need to know of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from ..compressors import Seeds
from ..exchange.group import Group
from ..kernels import noise
from ..monitor import recorder
from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Context:
    """A step of a plan.

    Attributes:
        plan: The plan.
        turn: How often the plan was part of the function before, which is being traced.
        due: Whether norms are measured in this step, a bool scalar; None while nobody watches.
    """

    plan: Plan
    turn: int
    due: tf.Tensor | None

    def group(self, what: str) -> Group:
        """For a collective: the ranks, and a name that is the same on all of them.

        Without TensorFlow's scopes: inside a tf.cond they end with a number that counts all that was traced in
        the process, be it on one rank only.
        """
        return Group(
            self.plan.settings.process_set, f"{self.plan.name}_{self.turn}_{what}", ignore_name_scope=True
        )

    def seeds(self, index: int) -> Seeds:
        """For the random numbers of a bucket."""
        shared = noise.fold(tf.cast(self.plan.step, tf.int32), index)
        return Seeds(shared, noise.fold(shared, self.plan.settings.process_set.rank() + 1))

    def nothing_lost(self) -> Any:
        """The norms of what crosses as it is."""
        return () if self.due is None else recorder.nothing_lost(self.due)
