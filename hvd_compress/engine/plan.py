"""What belongs to one list of gradients: its layout, its variables, its selectors and its observers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..exchange import choice
from ..exchange.collective import Collective
from ..exchange.group import Group
from ..exchange.hosts import Hosts
from ..formats.base import Shape
from ..kernels import noise
from .model_layout import ModelLayout
from .model_selector import ModelSelector
from .observer import Observer
from .selector import Selector
from .settings import Settings
from .state import State
from .transforms import Transform


@dataclasses.dataclass(eq=False)
class Plan:
    """How one list of gradients is reduced; `frontends.build` makes it.

    It keeps no reference to the variables, which may go before it does.

    Attributes:
        name: The beginning of its collectives' names.
        settings: How gradients are reduced.
        layout: How they are divided.
        state: The variables.
        selectors: The selector of each bucket.
        transforms: What is done to gradients before they are encoded.
        hosts: The hosts, where exchanges may be hierarchical; None where they may not.
        all_hosts: The hosts, also where exchanges are flat; None where they are not known.
        flat: Compressors whose exchange is flat all the same.
        auto: Chooses for the buckets of `auto`; None where there are none.
        observers: Who is told what steps measure.
        link: Seconds per allreduce and per byte sent, measured when the plan was made; None if not known.
        trace_indices: How often the plan is part of a function, before the last time; by the function's graph.
    """

    name: str
    settings: Settings
    layout: ModelLayout
    state: State
    selectors: Sequence[Selector]
    transforms: Transform
    hosts: Hosts | None = None
    all_hosts: Hosts | None = None
    flat: Sequence[Compressor] = ()
    auto: ModelSelector | None = None
    observers: list[Observer] = dataclasses.field(default_factory=list)
    link: tuple[float, float] | None = None
    trace_indices: weakref.WeakKeyDictionary[Any, int] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def collective(self, compressor: Compressor, shapes: Sequence[Shape]) -> Collective:
        """The collective for tensors of these shapes."""
        hosts = None if compressor in self.flat else self.hosts
        return choice.choose(compressor, shapes, self.settings.process_set.size(), hosts)

    def shapes_of(self, b: int, compressor: Compressor) -> list[Shape]:
        """The shapes of the tensors that are exchanged with a bucket.

        Those of the whole model belong to the last bucket of `auto`.
        """
        if self.layout.group_of(b).compressor.automatic and compressor.model_wide:
            return self.layout.model_wide.shapes if b == self.layout.auto_buckets[-1] else []
        return self.layout.shapes_of(b)

    def compressors(self) -> list[Compressor]:
        """The current compressor of each bucket, outside of the graph."""
        return [selector.current(b) for b, selector in enumerate(self.selectors)]

    @property
    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables that are alike on all ranks, by the names that checkpoints use."""
        return self.state.replicated | ({} if self.auto is None else self.auto.replicated_state())

    def group(self, trace_index: int, what: str) -> Group:
        """The ranks, and a name for collectives that is the same on all of them.

        Without TensorFlow's scopes: inside a tf.cond they end with a number that counts all that was traced in the
        process, maybe on one rank only.

        Args:
            trace_index: How often the plan was part of the function before.
            what: Distinguishes the collectives of a step.
        """
        return Group(self.settings.process_set, f"{self.name}_{trace_index}_{what}", ignore_name_scope=True)

    def seeds(self, index: int) -> Seeds:
        """The seeds of a bucket in the current step."""
        shared = noise.fold(tf.cast(self.state.step, tf.int32), index)
        return Seeds(shared, noise.fold(shared, self.settings.process_set.rank() + 1))
