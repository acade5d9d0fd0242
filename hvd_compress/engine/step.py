"""The graph of one step of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common import tracing
from ..common.names import plain_name
from ..compressors import Compressor
from ..compressors.error_feedback import all_finite
from ..exchange import uncompressed
from ..exchange.group import Group
from . import clock, measurement, nonfinite, norms
from .clock import Timestamps
from .embeddings import Embeddings
from .layout import FlatLayout
from .model_wide import ModelWideResult, reduce_model
from .observer import BucketMeasurement, StepMeasurement
from .packing import unpack
from .pipeline import BucketInput, BucketResult, StepContext, no_measure, reduce_bucket
from .plan import Plan

Changes = Sequence[tuple[tf.Variable, tf.Tensor]]


class Step:
    """Reduces one list of gradients.

    1. Transforms change all gradients together (clipping).
    2. Uncompressed gradients are reduced, along with the numbers of `auto` and the row counts of embeddings.
    3. Embeddings are reduced, row by row.
    4. Buckets are reduced, one after the other (`pipeline`).
    5. The new state is assigned, unless a gradient of any rank was not finite.
    6. Observers get the measurements.
    """

    def __init__(self, plan: Plan, gradients: Sequence[Any]) -> None:
        self._plan = plan
        # A gradient without a static shape gets that of its variable.
        self._gradients = [
            tf.ensure_shape(g, shape) if isinstance(g, tf.Tensor) and not g.shape.is_fully_defined() else g
            for g, shape in zip(gradients, plan.layout.shapes)
        ]
        self._changes: list[tuple[tf.Variable, tf.Tensor]] = []  # of the uncompressed gradients' velocities
        # Names of collectives must differ within the function that is being traced, and be the same on all ranks. So
        # the plan counts its uses in this function only: one rank may trace the functions around it twice. Calls of the
        # function may use the same names, as they run one after the other: they assign the same variables.
        graph = tracing.function_graph()
        self._trace_index = plan.trace_indices.get(graph, -1) + 1
        plan.trace_indices[graph] = self._trace_index
        settings = plan.settings
        self._transforms = plan.transforms
        self._context = StepContext(
            settings.scale, plan.collective, self._transforms, settings.residual_decay, settings.feeds_back
        )
        self._records = any(observer.records_steps for observer in plan.observers)
        self._sample_norms: tf.Tensor | None = None
        self._embeddings: Embeddings

    def run(self, progress: tf.Tensor | None = None) -> list[Any]:
        """The reduced gradients.

        Args:
            progress: The new value of `State.progress`; None leaves it as it is.
        """
        plan, state, layout = self._plan, self._plan.state, self._plan.layout
        with tf.name_scope(plan.name), tf.device(plan.settings.device_dense):
            step = state.step.read_value()
            samples = (observer.sample_norms() for observer in plan.observers)
            self._sample_norms = next((sample for sample in samples if sample is not None), None)
            if progress is not None and state.progress is not None:
                state.progress.assign(progress)

            # 1. Transforms
            self._gradients = self._transforms.prepare(self._gradients)
            ready = measurement.all_ready(layout, self._gradients) if self._records else None
            choices = self._choices()
            slices = [self._gradients[i] for i in layout.sparse]
            group = self._group("slices")
            self._embeddings = Embeddings(layout.embeddings, state.embeddings, slices, group, plan.settings)

            # 2. Uncompressed gradients
            dense, agreed, counts = self._reduce_uncompressed()
            reduced: dict[int, Any] = {}
            for tensors, result in zip(layout.uncompressed, dense):
                reduced |= {i: self._with_momentum(i, t) for i, t in zip(tensors.members, result.tensors)}
            flags = self._finite(dense)

            # 3. Embeddings
            seeds = [plan.seeds(len(layout.buckets) + e) for e in range(len(layout.embeddings))]
            sparse = self._embeddings.reduce(counts, seeds, state.embedding_counts)
            reduced |= dict(zip(layout.sparse, sparse))
            flags += [nonfinite.all_finite([slices]) for slices in sparse if self._keeps_state]

            # 4. and 5. Buckets. Uncompressed gradients are sent before the last one, so that they overlap with it.
            before_last = [tensor for result in dense for tensor in result.outgoing]
            gradients, results, loss, committed, probe = self._reduce_compressed(step, before_last, flags)
            reduced |= gradients

            # 6. Observers
            buckets = [
                BucketMeasurement(*result, choice) if result is not None and result.timestamps else None
                for result, choice in zip(results, choices)
            ]
            others, nbytes = self._measure_others(dense, sparse), self._embeddings.bytes_sent
            measured = StepMeasurement(step, committed, ready, buckets, others, nbytes, agreed, loss, probe)
            for observer in plan.observers:
                observer.observe(measured)

            state.step.assign_add(1)
            dgc = plan.settings.dgc
            if state.progress is not None and dgc is not None and dgc.steps_per_epoch is not None:
                state.progress.assign_add(1.0 / dgc.steps_per_epoch)
        return [reduced.get(i) for i in range(len(self._gradients))]

    # 2. Uncompressed gradients

    def _reduce_uncompressed(self) -> tuple[list[uncompressed.Dense], tf.Tensor | None, list[tf.Tensor]]:
        """The reduced gradients, the reduced numbers of `auto` (or None), and the reduced counts of embeddings."""
        auto = self._plan.auto
        numbers = [*([] if auto is None else [auto.numbers()]), *self._embeddings.counts]
        results, agreed = [], list[tf.Tensor]()
        for b, tensors in enumerate(self._plan.layout.uncompressed):
            gradients = [self._gradients[i] for i in tensors.members]
            # The numbers are sent with the first bucket.
            result = self._allreduce([*gradients, *numbers], f"dense_{b}")
            if numbers:
                agreed, numbers = result.tensors[len(gradients) :], []
                del result.tensors[len(gradients) :]
            results.append(result)
        if numbers:
            agreed = self._allreduce(numbers, "agreed").tensors
        return results, None if auto is None else agreed.pop(0), agreed

    def _allreduce(self, tensors: Sequence[tf.Tensor], name: str) -> uncompressed.Dense:
        settings = self._plan.settings
        return uncompressed.reduce(tensors, settings.op, settings.gradient_predivide_factor, self._group(name))

    def _with_momentum(self, i: int, reduced: tf.Tensor) -> tf.Tensor:
        """The velocity in place of an uncompressed gradient, the same on all ranks; without momentum, the gradient."""
        variable = self._plan.state.velocities.get(i)
        if variable is None:
            return reduced
        velocity = self._transforms.after_allreduce(reduced, variable.read_value())
        assert velocity is not None
        self._changes.append((variable, velocity))
        return tf.cast(velocity, reduced.dtype)

    # 4. Buckets

    def _reduce_compressed(
        self, step: tf.Tensor, before_last: Sequence[tf.Tensor], flags: list[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], list[_Measured | None], Any, tf.Tensor, Any]:
        """Reduces all buckets and assigns the new state.

        Returns:
            Reduced gradients by their positions; timestamps and norms of each bucket, or None; the loss of a model-wide
            candidate; whether the new state was assigned; the result of `ModelSelector.probe`.
        """
        layout, auto = self._plan.layout, self._plan.auto
        fixed = [b for b in range(len(layout.buckets)) if b not in layout.auto_buckets]
        first = self._reduce_buckets(fixed, [] if layout.auto_buckets else before_last)
        gradients = self._unpack(first)
        results = [_measured(first.get(b)) for b in range(len(layout.buckets))]
        if auto is None:
            return gradients, results, (), self._commit(flags, first), None

        probe = auto.probe(step, self._gradients)
        no_loss = auto.no_loss()
        after = [first[fixed[-1]].next_can_start] if fixed else []

        # The branches return the same structure.
        def per_bucket() -> Any:
            last = self._reduce_buckets(layout.auto_buckets, before_last, after)
            committed = self._commit(flags, {**first, **last})
            return self._unpack(last), [_measured(last[b]) for b in layout.auto_buckets], committed, no_loss

        def without_compression() -> Any:
            reduced, timestamps = self._reduce_auto_uncompressed()
            measured = [_Measured(times, self._lossless()) for times in timestamps]
            return reduced, measured, self._commit(flags, first), no_loss

        def model_wide(candidate: int, probed: tf.Tensor) -> Any:
            result = self._reduce_model(candidate, [*after, *before_last], probed)
            committed = self._commit([*flags, result.ok], first, result.changes)
            measured = [_Measured(*pair) for pair in zip(result.timestamps, result.norms)]
            return result.gradients, measured, committed, result.loss

        reduced, measured, committed, loss = auto.switch_model(per_bucket, without_compression, model_wide, step)
        for b, of_bucket in zip(layout.auto_buckets, measured):
            results[b] = of_bucket
        return gradients | reduced, results, loss, committed, probe

    def _reduce_buckets(
        self, buckets: Sequence[int], before_last: Sequence[tf.Tensor], after: Sequence[tf.Tensor] = ()
    ) -> dict[int, BucketResult]:
        """One bucket waits for the other: TensorFlow would encode all of them before it sends the first."""
        results: dict[int, BucketResult] = {}
        for b in buckets:
            if b == buckets[-1]:
                after = [*after, *before_last]
            members = self._plan.layout.group_of(b).layout.tensors.members
            gradients = [self._gradients[i] for i in members]
            results[b] = reduce_bucket(self._bucket(b), gradients, self._context, after)
            # When TensorFlow inlines a function, a control dependency on one of its results becomes one on the whole
            # call. An identity keeps it on the result.
            after = [tf.identity(results[b].next_can_start)]
        return results

    def _bucket(self, b: int) -> BucketInput:
        plan = self._plan
        measure = no_measure
        if self._sample_norms is not None:
            measure = functools.partial(norms.of_bucket, self._sample_norms)
        return BucketInput(
            plan.layout.group_of(b).layout,
            plan.layout.buckets[b].chunks,
            plan.selectors[b],
            plan.seeds(b),
            self._groups(f"bucket_{b}"),
            plan.state.of_bucket(plan.layout, b),
            b,
            any(observer.wants_times(b) for observer in plan.observers),
            measure,
        )

    def _reduce_model(self, candidate: int, after: Sequence[tf.Tensor], probed: tf.Tensor) -> ModelWideResult:
        plan = self._plan
        return reduce_model(
            plan.layout,
            plan.state,
            self._gradients,
            candidate,
            self._context,
            plan.seeds(plan.layout.auto_buckets[-1]),
            self._groups("whole"),
            after,
            probed,
            self._sample_norms,
        )

    def _reduce_auto_uncompressed(self) -> tuple[dict[int, tf.Tensor], list[Timestamps]]:
        """The gradients of `auto`, reduced as by stock Horovod, and the timestamps of their buckets."""
        layout = self._plan.layout
        gradients: dict[int, tf.Tensor] = {}
        timestamps: list[Timestamps] = []
        for b in layout.auto_buckets:
            of_group = layout.group_of(b).layout
            assert isinstance(of_group, FlatLayout)
            members = [of_group.tensors.members[i] for i in of_group.beginning_in(layout.buckets[b].chunks)]
            if not members:  # a part of a large gradient, which was reduced with the bucket before
                timestamps.append(clock.all_at(timestamps[-1].decoded))
                continue
            tensors = [self._gradients[i] for i in members]
            ready = clock.stamp(tensors[-1:])
            with tf.control_dependencies([ready]):  # or TensorFlow may read the clock after the exchange
                tensors = [tf.identity(tensor) for tensor in tensors]
            result = self._allreduce(tensors, f"plain_{b}")
            received = clock.stamp(result.incoming)
            timestamps.append(Timestamps(ready, ready, received, received))
            gradients |= dict(zip(members, result.tensors))
        return gradients, timestamps

    def _unpack(self, results: Mapping[int, BucketResult]) -> dict[int, tf.Tensor]:
        """The reduced gradients, by position."""
        layout = self._plan.layout
        gradients: dict[int, tf.Tensor] = {}
        for g, group in enumerate(layout.param_groups):
            buckets = [b for b in sorted(results) if layout.buckets[b].group == g]
            if buckets:
                members = group.layout.tensors.members
                chunks = [chunk for b in buckets for chunk in results[b].chunks]
                dtypes = [layout.dtypes[i] for i in members]
                gradients |= dict(zip(members, unpack(group.layout, chunks, dtypes)))
        return gradients

    # 5. The new state

    @property
    def _keeps_state(self) -> bool:
        state, layout = self._plan.state, self._plan.layout
        return bool(layout.param_groups or self._embeddings.has_residuals or state.velocities)

    def _finite(self, dense: Sequence[uncompressed.Dense]) -> list[tf.Tensor]:
        """Whether each uncompressed gradient is finite; [] for a plan without state."""
        if not self._keeps_state:
            return []
        tensors = [tensor for result in dense for tensor in result.incoming]
        return [all_finite(tensor) for tensor in tensors if tensor.dtype.is_floating]

    def _commit(self, flags: Sequence[tf.Tensor], results: Mapping[int, BucketResult], more: Changes = ()) -> tf.Tensor:
        """Assigns the new state if all gradients of all ranks were finite; returns whether they were, a bool scalar."""
        changes = [*self._changes, *more]
        for b, result in results.items():
            old = self._plan.state.of_bucket(self._plan.layout, b)
            for variables, values in zip(old, result.new_state):
                changes += zip(variables, values)
        flags = [*flags, *(result.ok for result in results.values())]
        if not flags:
            return tf.constant(True)
        ok = tf.reduce_all(tf.stack(flags))
        if not changes and not self._embeddings.has_residuals:
            return ok

        def assign() -> tf.Tensor:
            for variable, value in changes:
                with tf.device(variable.device):
                    variable.assign(value)
            self._embeddings.assign_residuals()
            return tf.constant(True)

        return tf.cond(ok, assign, lambda: tf.constant(False))

    # 6. Observers

    def _choices(self) -> list[tf.Tensor | None]:
        """The position of each bucket's compressor among its candidates; None if no observer records steps."""
        if not self._records:
            return [None] * len(self._plan.selectors)
        return [selector.choice(b) for b, selector in enumerate(self._plan.selectors)]

    def _measure_others(
        self, dense: Sequence[uncompressed.Dense], sparse: Sequence[tf.IndexedSlices]
    ) -> list[BucketMeasurement]:
        """The measurements of uncompressed gradients, then of embeddings; [] if no observer records steps."""
        if not self._records:
            return []
        slices, sample = [self._gradients[i] for i in self._plan.layout.sparse], self._sample_norms
        norms_of_all = [self._lossless() for _ in dense]
        norms_of_all += [()] * len(sparse) if sample is None else self._embeddings.norms(sample)
        return measurement.of_uncompressed(dense, slices, sparse, norms_of_all)

    def _lossless(self) -> Any:
        return () if self._sample_norms is None else norms.lossless(self._sample_norms)

    # Names of collectives

    def _group(self, what: str) -> Group:
        return self._plan.group(self._trace_index, what)

    def _groups(self, what: str) -> Callable[[Compressor], Group]:
        return lambda compressor: self._group(f"{what}_{plain_name(compressor.spec)}")


class _Measured(NamedTuple):
    """The measurements of a bucket."""

    timestamps: Any  # Timestamps; () where not timed
    norms: Any  # float32 [4]; () where not sampled


def _measured(result: BucketResult | None) -> _Measured | None:
    return None if result is None else _Measured(result.timestamps, result.measured)
