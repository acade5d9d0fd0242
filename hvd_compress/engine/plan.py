"""How one list of gradients is reduced: its layout, variables, selectors, transforms and observers."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..exchange import choice, uncompressed
from ..exchange.collective import Collective
from ..exchange.hosts import Hosts
from ..formats.base import Shape
from ..kernels import noise
from ..kernels.compile import uncompiled
from . import delay
from .compression_report import BucketReport
from .embedding_table import EmbeddingTable
from .guard import Guard
from .model_layout import ModelLayout
from .observer import Observer
from .selector import DelaySelector, ModelSelector, Selector
from .settings import Settings
from .state import State
from .transforms import Transform


@dataclasses.dataclass(eq=False)
class Plan:
    """How one list of gradients is reduced; `frontends.build` makes it.

    It keeps no reference to the model's variables, which may be deleted before it.
    """

    name: str  # the prefix of its collectives' names
    settings: Settings
    layout: ModelLayout
    state: State  # the plan's own variables
    selectors: Sequence[Selector]  # of each bucket
    transforms: Transform
    hosts: Hosts | None = None  # None if all exchanges are flat
    all_hosts: Hosts | None = None  # also if all exchanges are flat; None if they are not known
    flat: Sequence[Compressor] = ()  # whose exchange is flat even if `hosts` is set
    auto: ModelSelector | None = None  # the selector of the buckets of `auto`; None if there are none
    delay_selector: DelaySelector | None = None  # decides when the delay begins; None if the settings do
    only_candidate: tf.Variable | None = None  # the checksum of that of `auto` for all of training, if there is one
    observers: list[Observer] = dataclasses.field(default_factory=list)
    guard: Guard | None = None  # see `guarding.attach`
    round_length: Callable[[], int] | None = None  # the present one, if `auto` chooses it
    link: tuple[float, float] | None = None  # measured seconds per allreduce and per byte sent; None if not known
    # How often the plan is used in a function, minus 1; by the function's graph.
    trace_indices: weakref.WeakKeyDictionary[Any, int] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)

    @property
    def local_steps(self) -> int:
        """The steps from one exchange to the next. Not for use in a graph."""
        return self.settings.local_steps or 1 if self.round_length is None else self.round_length()

    def collective(self, compressor: Compressor, shapes: Sequence[Shape]) -> Collective:
        """The collective for tensors of these shapes."""
        hosts = None if compressor in self.flat else self.hosts
        return choice.choose(compressor, shapes, self.settings.process_set.size(), hosts)

    def shapes_of(self, b: int, compressor: Compressor) -> Sequence[Shape]:
        """The shapes of the tensors that are exchanged with a bucket.

        A model-wide candidate of `auto` exchanges all gradients with the last bucket, and nothing with the others.
        """
        if self.layout.group_of(b).compressor.automatic and compressor.model_wide:
            return self.layout.model_wide.shapes if b == self.layout.auto_buckets[-1] else []
        return self.layout.shapes_of(b)

    def compressors(self) -> list[Compressor]:
        """The current compressor of each bucket. Not for use in a graph."""
        return [selector.current(b) for b, selector in enumerate(self.selectors)]

    @property
    def embeddings(self) -> list[EmbeddingTable]:
        """Those of the layout, with the compressors of steps that are traced now."""
        if self.guard is not None and self.guard.leaves_rows_uncompressed:
            return [t.uncompressed for t in self.layout.embeddings]
        compresses = self.auto is None or self.auto.compresses_rows
        return [t if compresses or not t.automatic else t.uncompressed for t in self.layout.embeddings]

    @property
    def is_recorded(self) -> bool:
        """Whether an observer records its steps."""
        return any(observer.records_steps for observer in self.observers)

    def report(self) -> list[BucketReport]:
        """The compressor of each bucket and the reason for it, then those of the embeddings. Not for use in a graph."""
        layout = self.layout
        reports = [
            BucketReport(4 * sum(map(math.prod, layout.shapes_of(b))), compressor.spec)
            for b, compressor in enumerate(self.compressors())
        ]
        if self.auto is not None:
            for b, chosen in zip(layout.auto_buckets, self.auto.report(int(self.state.step))):
                reports[b] = chosen
        for i, table in zip(layout.sparse, self.embeddings):
            reports.append(BucketReport(4 * math.prod(table.shape), table.compressor.spec, rows_of=layout.paths[i]))
        return reports

    def bytes_sent(self) -> tuple[int, int]:
        """The bytes that each rank sends per step: as configured, and without compression. Not for use in a graph.

        Allreduces count as in a ring, and IndexedSlices as in the last step. Without compression, Horovod sends the
        values and row numbers of IndexedSlices, including duplicates. If `hvdc.init()` has found several hosts of
        several workers, these are the bytes that leave a host, divided by its workers (except for IndexedSlices).
        """
        layout = self.layout
        compressors = self.compressors()
        # If `auto` compresses no bucket, it reduces gradients as stock Horovod does, without the padding of chunks.
        as_stock = layout.auto_buckets if all(compressors[b].uncompressed for b in layout.auto_buckets) else ()
        rest: list[int] = list(layout.uncompressed_members)
        compressed: list[int] = []
        for group in layout.param_groups:
            (rest if as_stock and group.compressor.automatic else compressed).extend(group.layout.tensors.members)
        sizes = [math.prod(shape) for shape in layout.shapes]
        sent = self.bytes_in_ring(sum(sizes[i] * uncompressed.size_sent(layout.dtypes[i]) for i in rest))
        stock = self.bytes_in_ring(sum(sizes[i] * layout.dtypes[i].size for i in [*compressed, *rest]))
        sent += sum(
            self.bytes_of_bucket(b, compressor) for b, compressor in enumerate(compressors) if b not in as_stock
        )
        counts = self.state.embedding_counts
        for table, last in zip(self.embeddings, [] if counts is None else counts.numpy().tolist()):
            rows = table.bytes_sent(*last)
            sent, stock = sent + rows[0], stock + rows[1]
        return sent, stock

    def bytes_of_bucket(self, b: int, compressor: Compressor) -> int:
        """The bytes that each rank sends of a bucket with a compressor; see `bytes_sent`."""
        shapes, hosts = self.shapes_of(b, compressor), self.all_hosts
        collective = self.collective(compressor, shapes)
        if hosts is None:
            return collective.bytes_sent(compressor, shapes, self.settings.process_set.size())
        return collective.leaving_host(compressor, shapes, hosts.count, hosts.workers) // hosts.workers

    def bytes_in_ring(self, nbytes: int) -> int:
        """The bytes that each rank sends when `nbytes` are summed in a ring; see `bytes_sent`."""
        sent = uncompressed.bytes_sent(nbytes, self.settings.process_set.size())
        return sent if self.all_hosts is None else sent // self.all_hosts.workers  # it leaves each host once

    @property
    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables that are equal on all ranks, by their names in checkpoints."""
        variables = dict(self.state.replicated)
        for selector in (self.auto, self.delay_selector):
            variables |= {} if selector is None else selector.replicated_state()
        return variables | ({} if self.only_candidate is None else {"only_candidate": self.only_candidate})

    def let_nothing_wait(self) -> None:
        """Drops what waits, if there is a delay. Not for use in a graph."""
        for b, variables in self.state.waiting.items():
            compressor, shapes = self.layout.group_of(b).compressor, self.layout.shapes_of(b)
            values = delay.nothing(self.settings, compressor, shapes)
            # After a reset with another number of ranks they may differ. Then this plan is about to be dropped.
            if [v.shape for v in variables] == [value.shape for value in values]:
                for variable, value in zip(variables, values):
                    variable.assign(value)
        for variable in self.state.waiting_gradients.values():
            variable.assign(tf.zeros_like(variable))

    def seeds(self, step: tf.Tensor) -> list[Seeds]:
        """The seeds of each bucket in the step with this number, then of each embedding.

        There is at least one beyond those of the buckets, for the sample of `auto`. All are hashed at once, without
        XLA: this is traced sooner than a hash for each, and compiles nothing.
        """
        count = len(self.layout.buckets) + max(1, len(self.layout.sparse))
        with tf.device("CPU"), uncompiled():
            shared = noise.fold(tf.cast(step, tf.int32), tf.range(count))
            local = noise.fold(shared, self.settings.process_set.rank() + 1)
            return [Seeds(*pair) for pair in zip(tf.unstack(shared), tf.unstack(local))]


def bytes_per_step(plans: Iterable[Plan], local_steps: int) -> tuple[int, int]:
    """Bytes that a rank sends per step if all plans exchange once in `local_steps` steps; and stock Horovod in each."""
    each = [plan.bytes_sent() for plan in plans]
    return sum(sent for sent, _ in each) // local_steps, sum(stock for _, stock in each)
