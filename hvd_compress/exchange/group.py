"""The ranks between which a collective runs."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks, and the name of their collectives."""

    process_set: Any
    name: str | None  # the same on all ranks; None for Horovod's choice
    ignore_name_scope: bool = False  # whether the outer name scope is left out of the name

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.process_set.size())

    @property
    def rank(self) -> int:
        """The rank of this process among them."""
        return int(self.process_set.rank())

    def keywords(self, phase: str) -> dict[str, Any]:
        """The keywords of one of Horovod's collectives; `phase` distinguishes several of them by name."""
        return {
            "process_set": self.process_set,
            "name": self.name and self.name + phase,
            "ignore_name_scope": self.ignore_name_scope,
        }

    def among(self, process_set: Any, suffix: str) -> Group:
        """A group of some of the ranks, with `suffix` added to the name of its collectives."""
        return dataclasses.replace(self, process_set=process_set, name=self.name and self.name + suffix)
