"""The variables that a plan keeps from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common import tracing
from ..compressors import Compressor
from . import delay
from .grouping import Shape
from .model_layout import ModelLayout
from .settings import Settings


class BucketState(NamedTuple):
    """The state of one bucket: variables before the exchange, their new values in the same structure after it."""

    # In the chunks' shapes and `residual_dtype`; empty without error feedback. For a list of None, there are no old
    # residuals, and new ones are returned all the same.
    residuals: list[Any]
    velocities: list[Any]  # in the chunks' shapes, float32; empty without momentum correction
    factors: list[Any]  # of `factor_allreduce`, float32: one tensor for all matrices, or none
    has_foreign_residual: list[Any]  # one bool on the host if the exchange may be hierarchical, else none
    waiting: list[Any]  # what the next step exchanges, see `delay`; empty without delay


# The names of `State.progress` in checkpoints.
_PROGRESS_NAMES = {"epochs": "progress", "given": "progress", "training": "progress_of_training"}

NO_STATE = BucketState([], [], [], [], [])


@dataclasses.dataclass
class GroupState:
    """The variables of a parameter group that differ between ranks, in the shapes of its chunks."""

    residuals: list[tf.Variable]  # of dtype `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # of dtype float32; empty without momentum correction


@dataclasses.dataclass
class State:
    """All variables of a plan."""

    step: tf.Variable  # the number of steps so far, int64
    groups: list[GroupState]  # of each parameter group
    # The right factors of each parameter group, equal on all ranks: one variable for all matrices, or none.
    factors: list[list[tf.Variable]]
    embeddings: list[GroupState]  # of each embedding; a residual has the embedding's shape
    # For each bucket whose exchange may be hierarchical, by its index: whether this rank may have nonzero residuals of
    # chunks that another worker of its host exchanges. True until the first hierarchical exchange and after each flat
    # one. It is not saved, and true after a restore.
    has_foreign_residual: dict[int, tf.Variable]
    # The momentum of uncompressed gradients, float32, by their positions; equal on all ranks.
    velocities: dict[int, tf.Variable]
    # How far training is, float64: the epochs and the share of training so far, or what is given in each step. By
    # `Traits.counts`; each only if stages are counted so.
    progress: dict[str, tf.Variable]
    # Float64 [2], if callbacks tell how long training is: by how much the share of training grows in each step, and up
    # to where; else None. It is not saved.
    pace: tf.Variable | None
    follows_epochs: bool  # whether callbacks tell which epoch it is; otherwise steps are counted
    # For each embedding in the last step, int64 [embeddings, 3]: rows of all ranks together, whether they were
    # exchanged as a dense tensor, and this rank's slices before duplicate rows were summed. None without embeddings.
    embedding_counts: tf.Variable | None
    # The right factors of the model-wide candidates of `auto`, by the candidates' positions.
    model_wide_factors: dict[int, tf.Variable]
    # With a delay, what waits: of each bucket by its index, and uncompressed gradients by their positions.
    waiting: dict[int, list[tf.Variable]]
    waiting_gradients: dict[int, tf.Variable]

    def progress_of(self, compressor: Compressor) -> tf.Variable:
        """How far training is, in the unit that the compressor's stages are counted in."""
        return self.step if compressor.counts == "steps" else self.progress[compressor.counts]

    def of_bucket(self, layout: ModelLayout, b: int) -> BucketState:
        """The variables of one bucket."""
        bucket = layout.buckets[b]
        group = self.groups[bucket.group]
        chunks = slice(bucket.chunks.start, bucket.chunks.stop)
        foreign = [self.has_foreign_residual[b]] if b in self.has_foreign_residual else []
        waiting = self.waiting.get(b, [])
        return BucketState(
            group.residuals[chunks], group.velocities[chunks], self.factors[bucket.group], foreign, waiting
        )

    @property
    def replicated(self) -> dict[str, tf.Variable]:
        """The variables that are equal on all ranks, by their names in checkpoints."""
        factors = [variable for of_group in self.factors for variable in of_group]
        return {
            "step": self.step,
            **{f"factors_{i}": variable for i, variable in enumerate(factors)},
            **{_PROGRESS_NAMES[count]: variable for count, variable in self.progress.items()},
            **{f"velocity_{i}": variable for i, variable in self.velocities.items()},
            **{f"auto_factors_{c}": variable for c, variable in self.model_wide_factors.items()},
        }


def new_state(name: str, settings: Settings, layout: ModelLayout) -> State:
    """The state before the first step; `name` is the prefix of the variables' names."""

    def variable(value: tf.Tensor, what: str) -> tf.Variable:
        return tracing.variable(value, f"{name}_{what}")

    def group_state(compressor: Compressor, shapes: Sequence[Shape], momentum: float) -> GroupState:
        feeds_back, dtype = settings.feeds_back(compressor), settings.residual_dtype
        return GroupState(
            [variable(tf.zeros(shape, dtype), "residual") for shape in shapes if feeds_back],
            [variable(tf.zeros(shape), "velocity") for shape in shapes if momentum],
        )

    def factors(compressor: Compressor, shapes: Sequence[Shape]) -> list[tf.Variable]:
        initial = compressor.initial_factors(shapes)
        return [] if initial is None else [variable(initial, "factors")]

    momentum = settings.momentum_correction
    with tf.device(settings.device_dense):
        groups = [group_state(g.compressor, g.layout.shapes, momentum) for g in layout.param_groups]
        of_groups = [factors(g.compressor, g.layout.shapes) for g in layout.param_groups]
        # Only `dgc` also applies its momentum to uncompressed gradients.
        uncompressed = layout.uncompressed_members if settings.dgc is not None and momentum else []
        floats = [i for i in uncompressed if layout.dtypes[i].is_floating]
        velocities = {i: variable(tf.zeros(layout.shapes[i]), "velocity") for i in floats}
        model_wide = {
            c: of_candidate
            for c, candidate in enumerate(() if layout.auto is None else layout.auto.candidates)
            if candidate.model_wide
            for of_candidate in factors(candidate, layout.model_wide.shapes)
        }
        waiting: dict[int, list[tf.Variable]] = {}
        waiting_gradients: dict[int, tf.Variable] = {}
        if settings.delay:
            for b in range(len(layout.buckets)):
                of_bucket = delay.nothing(settings, layout.group_of(b).compressor, layout.shapes_of(b))
                waiting[b] = [variable(tensor, "waiting") for tensor in of_bucket]
            waiting_gradients = {
                i: variable(tf.zeros(layout.shapes[i], layout.dtypes[i]), "waiting")
                for i in layout.uncompressed_members
            }
    with tf.device(settings.device_sparse):
        embeddings = [group_state(e.compressor, [e.shape], 0.0) for e in layout.embeddings]
    with tf.device("CPU"):
        has_foreign_residual = {
            b: variable(tf.constant(True), "has_foreign_residual")
            for b, bucket in enumerate(layout.buckets)
            if layout.may_be_hierarchical and groups[bucket.group].residuals
        }
        staged = [g.compressor for g in layout.param_groups if len(g.compressor.stages) > 1]
        progress = {
            count: variable(tf.constant(0.0, tf.float64), saved_name)
            for count, saved_name in _PROGRESS_NAMES.items()
            if any(compressor.counts == count for compressor in staged)
        }
        told = [count for count in progress if settings.steps_per(count) is None]
        pace = variable(tf.zeros([2], tf.float64), "pace") if "training" in told else None
        counts = variable(tf.zeros([len(embeddings), 3], tf.int64), "embedding_counts") if embeddings else None
    step = variable(tf.constant(0, tf.int64), "step")
    return State(
        step, groups, of_groups, embeddings, has_foreign_residual, velocities, progress, pace, "epochs" in told, counts,
        model_wide, waiting, waiting_gradients,
    )  # fmt: skip
