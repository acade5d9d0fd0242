"""What belongs to one list of gradients: how it is divided into buckets, and what is kept from step to step."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..auto import flat_or_hierarchical as levels
from ..auto import report, start
from ..auto.report import BucketReport
from ..auto.selector import AutoSelector
from ..common import checks, tracing
from ..common.names import path_of
from ..compressors import Auto, Compressor, NoCompression
from ..cost.calibrate import calibrate
from ..exchange import choice, hosts, uncompressed
from ..exchange.collective import Collective
from ..exchange.rows_gather import Table
from ..monitor.recorder import Recorder
from . import grouping as buckets
from . import layout as geometry
from .grouping import Shape, TensorGroup
from .model_wide_state import of_sections
from .packing import FlatPacking, PerTensorPacking
from .settings import Settings
from .state import EmbeddingGroup, GroupState, ParamGroup


class Plan:
    """How one list of gradients is reduced.

    Attributes:
        param_groups: What is compressed, and the residuals.
        buckets: Which chunks of which param_group cross at once, in this order.
        dense: Positions of the gradients that are reduced uncompressed, in buckets of their own.
        sparse: Positions of IndexedSlices.
        tables: How these cross, in the same order.
        slices: Of each table in the last step, int64 [tables, 3]: rows of all ranks together, whether they crossed as
            a dense tensor, and this rank's slices before those of the same row were summed; None without tables.
        chosen: Positions of the buckets of `auto`, which are the last ones.
        whole: What candidates of `auto` need that see gradients in their own shapes; None where there are none.
        selector: What chooses for these; None where there are none.
        hosts: Between which compressed gradients may cross in two levels; None where they may not.
        flat: Compressors that cross in one level all the same.
        has_foreign_residual: Of buckets that may cross in two levels, by their positions: whether this rank may have
            residuals other than zero of chunks that another rank carries, bool. True after an exchange in one level and
            until the first one in two levels; not saved, but true after a restore.
        paths: The variables' paths or names.
        step: How many steps were made, int64.
        progress: How far training has come, float64, for compressors that change with it: epochs of `dgc`'s warm-up,
            or whether `OneBitAdam` has frozen its variance. None where there are none.
        velocities: Of dgc's momentum for the uncompressed gradients, float32, by their positions; alike on all ranks.
        turns: How often the plan is part of a function, before the last time; by the function's graph.
        link: Seconds per allreduce and per byte sent, measured when the plan was made; None if not known.
        recorder: Of what is measured in each step; None while nobody watches. Read when a step is traced.
        named: What is saved besides the param_groups' states: variables whose values are alike on all ranks.
    """  # keeps no reference to the variables: they may go before it does

    def __init__(
        self, name: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        self.name = name
        self.settings = settings
        self._placed = hosts.usable(settings.process_set, settings.hierarchical)
        two_levels = settings.hierarchical is not False and not settings.momentum_correction
        self.hosts = self._placed if two_levels else None
        self.flat: list[Compressor] = []
        self.shapes = [_static_shape(g, v) for g, v in zip(gradients, variables)]
        self.paths = [path_of(v) for v in variables]
        self.dtypes: list[Any] = [None if g is None else g.dtype for g in gradients]
        for path, dtype in zip(self.paths, self.dtypes):
            if dtype is not None:
                checks.reducible(f"the gradient of {path or 'a tensor'}", dtype)
        self.sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        sparse = set(self.sparse)
        tensors = [i for i, g in enumerate(gradients) if g is not None and i not in sparse]
        compressors = {i: settings.compressor_of(self.paths[i]) for i in tensors}
        chosen = [i for i in tensors if self._is_compressed(i, compressors[i])]
        groups = _positions(settings.groups, variables)
        self.param_groups = []
        # In the order of the variables, but `auto` last.
        for compressor in sorted(_distinct([compressors[i] for i in chosen]), key=lambda c: c.automatic):
            # Without groups all go end to end, and buckets end where a chunk does.
            members = [i for i in chosen if compressors[i] == compressor]
            for bucket in buckets.assign(self.shapes, members, sys.maxsize, groups):
                layout = self._layout(bucket, compressor)
                state = self._new_state(compressor, layout.shapes)
                self.param_groups.append(
                    ParamGroup(compressor, layout, state, self._new_factors(compressor, layout))
                )
        self.buckets = [
            (param_group, chunks)
            for param_group in self.param_groups
            for chunks in param_group.layout.in_buckets(
                self._limit(param_group.layout.tensors, param_group.compressor)
            )
        ]
        compressed = set(chosen)
        rest = [i for i in tensors if i not in compressed]
        self.embeddings = [self._table(i) for i in self.sparse]
        limit = self._limit(TensorGroup(tuple(rest), tuple(self.shapes[i] for i in rest)))
        self.dense = buckets.assign(self.shapes, rest, limit, None if chosen else groups)
        self.step = tracing.variable(tf.constant(0, tf.int64), f"{name}_step")
        with tf.device("CPU"):
            seen = tf.zeros([len(self.embeddings), 3], tf.int64)
            self.slices = tracing.variable(seen, f"{name}_slices") if self.embeddings else None
        self.chosen = [
            b for b, (param_group, _) in enumerate(self.buckets) if param_group.compressor.automatic
        ]
        self.has_foreign_residual = self._new_flags()
        self._choose_levels()
        self.model_wide = of_sections(self.param_groups, name, settings.device_dense)
        self.selector = self._new_chooser() if self.chosen else None
        self.link: tuple[float, float] | None = None
        self.recorder: Recorder | None = None
        self.turns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        factors = [variable for param_group in self.param_groups for variable in param_group.factors]
        self.replicated_state = {
            "step": self.step,
            **{f"factors_{i}": variable for i, variable in enumerate(factors)},
        }
        self.progress: tf.Variable | None = None
        if any(len(param_group.compressor.stages) > 1 for param_group in self.param_groups):
            with tf.device("CPU"):
                self.progress = tracing.variable(tf.constant(0.0, tf.float64), f"{name}_progress")
            self.replicated_state["progress"] = self.progress
        self.velocities = self._dense_velocities()
        self.replicated_state |= {f"velocity_{i}": variable for i, variable in self.velocities.items()}
        if self.selector is not None:
            fields = self.selector.state._asdict()
            self.replicated_state |= {f"auto_{name}": variable for name, variable in fields.items()}
        if self.model_wide is not None:
            self.replicated_state |= {
                f"auto_factors_{c}": variable for c, variable in self.model_wide.factors.items()
            }

    def _new_chooser(self) -> AutoSelector:
        auto = self.buckets[self.chosen[0]][0].compressor
        assert isinstance(auto, Auto)
        mine = [self.buckets[b] for b in self.chosen]
        shapes = [param_group.layout.shapes[chunks.start : chunks.stop] for param_group, chunks in mine]
        calibration = start.calibration(auto, self.settings, shapes[0][0])
        if self.hosts is not None and self.settings.hierarchical is True:
            levels.check(calibration, self.hosts)
        elif self.hosts is not None:
            candidates = [(candidate, shapes) for candidate in auto.candidates]
            self.flat += levels.flat_ones(candidates, calibration, self.settings, self.hosts)
        whole = [] if self.model_wide is None else self.model_wide.shapes
        return start.selector(auto, self.settings, shapes, whole, calibration, self.pattern)

    def _choose_levels(self) -> None:
        """Compares one level and two for compressors that are not chosen automatically, if it is ours to choose."""
        if self.hosts is None or self.settings.hierarchical != "auto":
            return
        fixed = [param_group for param_group in self.param_groups if not param_group.compressor.automatic]
        candidates = [
            (s.compressor, [s.layout.shapes[p.start : p.stop] for other, p in self.buckets if other is s])
            for s in fixed
        ]
        candidates = [(c, buckets) for c, buckets in candidates if levels.fits(c, buckets, self.hosts)]
        if candidates:
            chunk = candidates[0][1][0][0]
            found = calibrate([c for c, _ in candidates], self.settings.process_set, chunk[0])
            self.flat += levels.flat_ones(candidates, found, self.settings, self.hosts)

    def pattern(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> Collective:
        """The collective for a bucket of chunks of these shapes, see `exchange.choice`."""
        hosts = None if compressor in self.flat else self.hosts
        return choice.choose(compressor, shapes, self.settings.process_set.size(), hosts)

    def shapes_of(self, b: int, compressor: Compressor) -> list[Shape]:
        """Of the tensors that cross with a bucket: the whole model's with the last one if it crosses at once."""
        param_group, chunks = self.buckets[b]
        if param_group.compressor.automatic and (compressor is not None and compressor.model_wide):
            assert self.model_wide is not None
            return self.model_wide.shapes if b == self.chosen[-1] else []
        return param_group.layout.shapes[chunks.start : chunks.stop]

    def changed_by(self, b: int) -> list[tf.Variable]:
        """What a bucket's exchange changes."""
        param_group, chunks = self.buckets[b]
        state = param_group.state.part(chunks)
        has_foreign_residual = [self.has_foreign_residual[b]] if b in self.has_foreign_residual else []
        return [*state.residuals, *state.velocities, *param_group.factors, *has_foreign_residual]

    @property
    def stateful_groups(self) -> list[ParamGroup]:
        """What has state to be saved."""
        return [
            *self.param_groups,
            *(param_group for param_group in self.embeddings if param_group.state.residuals),
        ]

    def _table(self, i: int) -> EmbeddingGroup:
        shape, path = self.shapes[i], self.paths[i]
        wanted = self.settings.compressor_of(path)
        compressor = wanted.for_rows() if self._is_compressed(i, wanted) else NoCompression()
        layout = PerTensorPacking(TensorGroup((i,), (shape,)))
        limit = self._limit(layout.tensors)
        table = Table(shape, self.dtypes[i], compressor, self.settings.process_set.size(), limit)
        state = self._new_state(compressor, [shape], rows=True)
        return EmbeddingGroup(compressor, layout, state, [], table)

    def _limit(self, members: TensorGroup, compressor: Compressor | None = None) -> int:
        """Bytes of float32 that cross at once at most."""
        if self.settings.groups is not None or (compressor is not None and compressor.model_wide):
            return sys.maxsize
        return geometry.bucket_limit(self.settings.bucket_bytes, members.numel)

    def _layout(self, members: TensorGroup, compressor: Compressor) -> FlatPacking | PerTensorPacking:
        """The chunks in which the compressor sees these gradients."""
        if compressor.per_tensor:
            return PerTensorPacking(members)
        candidates = compressor.candidates
        ranks = self.settings.process_set.size()
        limit = self._limit(members)
        workers = self.hosts.workers if self.hosts is not None else 1
        flat = geometry.flat(members, candidates, limit, ranks, workers)
        return FlatPacking(flat.tensors, flat.multiple, flat.alignment, flat.largest)

    def _is_compressed(self, i: int, compressor: Compressor) -> bool:
        if compressor.uncompressed or not self.dtypes[i].is_floating:
            return False
        return geometry.is_compressed(self.shapes[i], self.settings.min_compress_size)

    def _new_state(
        self, compressor: Compressor, shapes: Sequence[tuple[int, ...]], rows: bool = False
    ) -> GroupState:
        device = self.settings.device_sparse if rows else self.settings.device_dense

        def zeros(what: str, dtype: str) -> list[tf.Variable]:
            with tf.device(device):
                return [tracing.variable(tf.zeros(shape, dtype), f"{self.name}_{what}") for shape in shapes]

        return GroupState(
            zeros("residual", self.settings.residual_dtype) if self.settings.feeds_back(compressor) else [],
            zeros("velocity", "float32") if self.settings.momentum_correction and not rows else [],
        )

    def _new_factors(
        self, compressor: Compressor, layout: FlatPacking | PerTensorPacking
    ) -> list[tf.Variable]:
        factors = compressor.initial_factors(layout.shapes)
        if factors is None:
            return []
        with tf.device(self.settings.device_dense):
            return [tracing.variable(factors, f"{self.name}_factors")]

    def _new_flags(self) -> dict[int, tf.Variable]:
        if self.hosts is None:
            return {}
        kept = [b for b, (param_group, _) in enumerate(self.buckets) if param_group.state.residuals]
        with tf.device("CPU"):
            return {b: tracing.variable(tf.constant(True), f"{self.name}_astray") for b in kept}

    def _dense_velocities(self) -> dict[int, tf.Variable]:
        if self.settings.dgc is None or not self.settings.momentum_correction:
            return {}
        floats = [i for bucket in self.dense for i in bucket.members if self.dtypes[i].is_floating]
        with tf.device(self.settings.device_dense):
            return {i: tracing.variable(tf.zeros(self.shapes[i]), f"{self.name}_velocity") for i in floats}

    def stage(self, compressor: Compressor) -> tf.Tensor:
        """Which of the compressor's stages holds now; int32 scalar, the same on all ranks."""
        with tf.device("CPU"):
            return (
                tf.constant(0) if self.progress is None else compressor.stage_at(self.progress.read_value())
            )

    def compressors(self) -> list[Compressor]:
        """What each bucket is compressed with now."""
        found = [s.compressor.stages[int(self.stage(s.compressor))] for s, _ in self.buckets]
        if self.selector is not None:
            for b, compressor in zip(self.chosen, self.selector.chosen()):
                found[b] = compressor
        return found

    def report(self) -> list[BucketReport]:
        """What each bucket is compressed with and why."""
        found = [
            BucketReport(
                4 * sum(map(math.prod, param_group.layout.shapes[p.start : p.stop])), compressor.spec
            )
            for compressor, (param_group, p) in zip(self.compressors(), self.buckets)
        ]
        if self.selector is not None:
            for b, chosen in zip(self.chosen, report.of_selector(self.selector, int(self.step))):
                found[b] = chosen
        for param_group in self.embeddings:
            nbytes = 4 * param_group.layout.tensors.numel
            (i,) = param_group.layout.tensors.members
            found.append(BucketReport(nbytes, param_group.compressor.spec, rows_of=self.paths[i]))
        return found

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: as configured, and if nothing were compressed.

        As a ring sends them. IndexedSlices count as in the last step; uncompressed they are what Horovod would send,
        values and numbers of rows as they come. Where `hvdc.init()` has found several hosts of several workers: what
        leaves a host, divided by its workers (but for IndexedSlices).
        """
        ranks = self.settings.process_set.size()
        plain = {
            i: math.prod(self.shapes[i]) * self.dtypes[i].size
            for bucket in (*(param_group.layout.tensors for param_group in self.param_groups), *self.dense)
            for i in bucket.members
        }
        dense = sum(plain[i] for bucket in self.dense for i in bucket.members)
        sent, as_plain = (uncompressed.bytes_sent(nbytes, ranks) for nbytes in (dense, sum(plain.values())))
        if self._placed is not None:  # a ring leaves each host once
            sent, as_plain = sent // self._placed.workers, as_plain // self._placed.workers
        for b, compressor in enumerate(self.compressors()):
            shapes = self.shapes_of(b, compressor)
            pattern = self.pattern(compressor, shapes)
            if self._placed is None:
                sent += pattern.bytes_sent(compressor, shapes, ranks)
            else:
                hosts, workers = self._placed.count, self._placed.workers
                sent += pattern.leaving_host(compressor, shapes, hosts, workers) // workers
        for param_group, last in zip(
            self.embeddings, [] if self.slices is None else self.slices.numpy().tolist()
        ):
            rows = param_group.table.bytes_sent(*last)
            sent, as_plain = sent + rows[0], as_plain + rows[1]
        return sent, as_plain


def _static_shape(gradient: Any, variable: Any) -> tuple[int, ...]:
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        # How many rows there are depends on the batch.
        gradient = tf.TensorSpec(tf.TensorShape([None]).concatenate(gradient.values.shape[1:]))
    shape, own = gradient.shape, tf.TensorShape(variable.shape)
    if not shape.is_compatible_with(own):
        raise ValueError(f"the gradient of {path_of(variable)} has shape {shape}, the variable {own}")
    shape = shape.merge_with(own)
    if not shape.is_fully_defined():
        raise ValueError(
            f"the gradient of {path_of(variable)} has the unknown shape {shape}: set it with tf.ensure_shape"
        )
    return tuple(shape.as_list())


def _positions(groups: Any, variables: Sequence[Any]) -> Any:
    """Groups of variables as groups of their positions in `variables`."""
    if not isinstance(groups, (list, tuple)):
        return groups
    position = {id(variable): i for i, variable in enumerate(variables)}
    return [[position[id(v)] for v in group if id(v) in position] for group in groups]


def _distinct(compressors: Sequence[Compressor]) -> list[Compressor]:
    found: list[Compressor] = []
    for compressor in compressors:
        if compressor not in found:  # may have no hash
            found.append(compressor)
    return found
