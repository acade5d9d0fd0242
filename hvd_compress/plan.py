"""What belongs to one list of gradients: how it is divided into buckets, and what is kept from step to step."""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from . import buckets, checks, geometry, tracing
from .auto import report, start
from .auto.chooser import Chooser
from .auto.report import BucketReport
from .buckets import Bucket
from .checkpoint import plan_state
from .compressors import Auto, Compressor, NoCompression, PowerSGD
from .exchange import choice, low_rank, uncompressed
from .monitor.recorder import Recorder
from .pieces import FlatPieces, WholeTensors
from .settings import Settings


@dataclasses.dataclass
class LayoutState:
    """What a rank keeps of a layout's pieces from step to step, in their shapes; never broadcast."""

    residuals: list[tf.Variable]  # of `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # float32; empty without momentum correction

    def part(self, pieces: range) -> LayoutState:
        """The state of some of the pieces."""
        part = slice(pieces.start, pieces.stop)
        return LayoutState(self.residuals[part], self.velocities[part])


@dataclasses.dataclass
class Section:
    """Gradients that share a compressor, as the pieces that it sees, and what is kept of these."""

    compressor: Compressor
    layout: FlatPieces | WholeTensors
    state: LayoutState
    # Of `exchange.low_rank`, alike on all ranks: one variable for all matrices, or none.
    factors: list[tf.Variable] = dataclasses.field(default_factory=list)


class Plan:
    """How one list of gradients is reduced.

    Attributes:
        sections: What is compressed, and the residuals.
        buckets: Which pieces of which section cross at once, in this order.
        dense: Positions of the gradients that are reduced uncompressed, in buckets of their own.
        sparse: Positions of IndexedSlices.
        chosen: Positions of the buckets of `auto`, which are the last ones.
        chooser: What chooses for these; None where there are none.
        paths: The variables' paths or names.
        step: How many steps were made, int64.
        turns: How often the plan is part of a function, before the last time; by the function's graph.
        link: Seconds per allreduce and per byte sent, measured when the plan was made; None if not known.
        recorder: Of what is measured in each step; None while nobody watches. Read when a step is traced.
        named: What is saved besides the sections' states: variables whose values are alike on all ranks.
    """  # keeps no reference to the variables: they may go before it does

    def __init__(
        self, name: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        self.name = name
        self.settings = settings
        self.shapes = [_static_shape(g, v) for g, v in zip(gradients, variables)]
        self.paths = [plan_state.path_of(v) for v in variables]
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
        self.sections = []
        # In the order of the variables, but `auto` last.
        for compressor in sorted(
            _distinct([compressors[i] for i in chosen]), key=lambda c: isinstance(c, Auto)
        ):
            # Without groups all go end to end, and buckets end where a piece does.
            members = [i for i in chosen if compressors[i] == compressor]
            for bucket in buckets.assign(self.shapes, members, sys.maxsize, groups):
                layout = self._layout(bucket, compressor)
                state = self._new_state(compressor, layout.shapes)
                self.sections.append(
                    Section(compressor, layout, state, self._new_factors(compressor, layout))
                )
        self.buckets = [
            (section, pieces)
            for section in self.sections
            for pieces in section.layout.in_buckets(self._limit(section.layout.bucket, section.compressor))
        ]
        compressed = set(chosen)
        rest = [i for i in tensors if i not in compressed]
        limit = self._limit(Bucket(tuple(rest), tuple(self.shapes[i] for i in rest)))
        self.dense = buckets.assign(self.shapes, rest, limit, None if chosen else groups)
        self.step = tracing.variable(tf.constant(0, tf.int64), f"{name}_step")
        self.chosen = [
            b for b, (section, _) in enumerate(self.buckets) if isinstance(section.compressor, Auto)
        ]
        self.chooser = self._new_chooser() if self.chosen else None
        self.link: tuple[float, float] | None = None
        self.recorder: Recorder | None = None
        self.turns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        factors = [variable for section in self.sections for variable in section.factors]
        self.named = {"step": self.step, **{f"factors_{i}": variable for i, variable in enumerate(factors)}}
        if self.chooser is not None:
            fields = self.chooser.state._asdict()
            self.named |= {f"auto_{name}": variable for name, variable in fields.items()}

    def _new_chooser(self) -> Chooser:
        auto = self.buckets[self.chosen[0]][0].compressor
        assert isinstance(auto, Auto)
        mine = [self.buckets[b] for b in self.chosen]
        shapes = [section.layout.shapes[pieces.start : pieces.stop] for section, pieces in mine]
        return start.chooser(auto, self.settings, shapes)

    def _limit(self, members: Bucket, compressor: Compressor | None = None) -> int:
        """Bytes of float32 that cross at once at most."""
        if self.settings.groups is not None or isinstance(compressor, PowerSGD):
            return sys.maxsize
        return geometry.bucket_limit(self.settings.bucket_bytes, members.numel)

    def _layout(self, members: Bucket, compressor: Compressor) -> FlatPieces | WholeTensors:
        """The pieces in which the compressor sees these gradients."""
        if compressor.per_tensor:
            return WholeTensors(members)
        candidates = compressor.candidates if isinstance(compressor, Auto) else (compressor,)
        ranks = self.settings.process_set.size()
        limit = self._limit(members)
        flat = geometry.flat(members, candidates, compressor.alignment, limit, ranks)
        return FlatPieces(flat.bucket, flat.multiple, flat.alignment, flat.largest)

    def _is_compressed(self, i: int, compressor: Compressor) -> bool:
        if isinstance(compressor, NoCompression) or not self.dtypes[i].is_floating:
            return False
        return geometry.is_compressed(self.shapes[i], self.settings.min_compress_size)

    def _new_state(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> LayoutState:
        def zeros(what: str, dtype: str) -> list[tf.Variable]:
            with tf.device(self.settings.device_dense):
                return [tracing.variable(tf.zeros(shape, dtype), f"{self.name}_{what}") for shape in shapes]

        return LayoutState(
            zeros("residual", self.settings.residual_dtype) if self.settings.feeds_back(compressor) else [],
            zeros("velocity", "float32") if self.settings.momentum_correction else [],
        )

    def _new_factors(self, compressor: Compressor, layout: FlatPieces | WholeTensors) -> list[tf.Variable]:
        if not isinstance(compressor, PowerSGD):
            return []
        with tf.device(self.settings.device_dense):
            start = low_rank.start(compressor, layout.shapes)
            return [tracing.variable(start, f"{self.name}_factors")]

    def compressors(self) -> list[Compressor]:
        """What each bucket is compressed with now."""
        found = [section.compressor for section, _ in self.buckets]
        if self.chooser is not None:
            for b, compressor in zip(self.chosen, self.chooser.chosen()):
                found[b] = compressor
        return found

    def report(self) -> list[BucketReport]:
        """What each bucket is compressed with and why."""
        found = [
            BucketReport(
                4 * sum(map(math.prod, section.layout.shapes[p.start : p.stop])), section.compressor.spec
            )
            for section, p in self.buckets
        ]
        if self.chooser is not None:
            for b, chosen in zip(self.chosen, report.of_chooser(self.chooser, int(self.step))):
                found[b] = chosen
        return found

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: as configured, and if nothing were compressed.

        As a ring sends them; what IndexedSlices cost depends on the batch and is not counted.
        """
        ranks = self.settings.process_set.size()
        plain = {
            i: math.prod(self.shapes[i]) * self.dtypes[i].size
            for bucket in (*(section.layout.bucket for section in self.sections), *self.dense)
            for i in bucket.members
        }
        dense = sum(plain[i] for bucket in self.dense for i in bucket.members)
        sent = uncompressed.bytes_sent(dense, ranks)
        for compressor, (section, pieces) in zip(self.compressors(), self.buckets):
            shapes = section.layout.shapes[pieces.start : pieces.stop]
            sent += choice.choose(compressor, shapes, ranks).bytes_sent(compressor, shapes, ranks)
        return sent, uncompressed.bytes_sent(sum(plain.values()), ranks)


def _static_shape(gradient: Any, variable: Any) -> tuple[int, ...]:
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        return ()
    shape, own = gradient.shape, tf.TensorShape(variable.shape)
    if not shape.is_compatible_with(own):
        raise ValueError(
            f"the gradient of {plan_state.path_of(variable)} has shape {shape}, the variable {own}"
        )
    shape = shape.merge_with(own)
    if not shape.is_fully_defined():
        raise ValueError(
            f"the gradient of {plan_state.path_of(variable)} has the unknown shape {shape}: set it with tf.ensure_shape"
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
