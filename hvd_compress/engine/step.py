"""The graph of one step of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..common import tracing
from ..common.gradients import values_of
from ..common.names import plain_name
from ..compressors import Compressor, Seeds
from ..compressors.error_feedback import all_finite
from ..exchange import uncompressed
from ..exchange.group import Group
from . import clock, delay, gradient_order, nonfinite, norms
from .embeddings import Embeddings
from .layout import FlatLayout
from .model_wide import reduce_model
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
        gradients = gradient_order.compute_in_order(gradients)
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
        self._context = StepContext(
            settings.scale, plan.collective, plan.transforms, settings.residual_decay, settings.feeds_back,
            data=tracing.data_of_step(),
        )  # fmt: skip
        # Keras learns that the data has ended from a step that fails. What waits for no gradient may run then on one
        # rank and not on another. So what is counted waits for these, or seeds would differ.
        given = [values_of(g) for g in self._gradients if g is not None]
        self._begun = [*self._context.data, *given[:1]]
        self._waiting: list[tuple[tf.Variable, tf.Tensor]] = []  # of uncompressed gradients, with a delay
        self._sample_norms: tf.Tensor | None = None
        self._embeddings: Embeddings
        self._seeds: list[Seeds] = []

    def run(self, given: tf.Tensor | None = None) -> list[Any]:
        """The reduced gradients. `given` is the new value of `State.progress["given"]`; None leaves it as it is."""
        plan, state, layout = self._plan, self._plan.state, self._plan.layout
        with tf.name_scope(plan.name), tf.device(plan.settings.device_dense):
            step = state.step.read_value()
            if layout.buckets or layout.sparse:
                self._seeds = plan.seeds(step)
            samples = (observer.sample_norms() for observer in plan.observers)
            self._sample_norms = next((sample for sample in samples if sample is not None), None)
            if plan.settings.delay_warmup:
                self._context = self._context._replace(is_warm_up=step < plan.settings.delay_warmup)
            if plan.delay_selector is not None:
                self._context = self._context._replace(is_warm_up=~plan.delay_selector.has_begun())
            if given is not None and "given" in state.progress:
                state.progress["given"].assign(given)

            # 1. Transforms
            own = self._gradients
            self._gradients = plan.transforms.prepare(self._gradients)
            ready = self._all_ready() if plan.is_recorded else None
            choices = [selector.choice(b) if plan.is_recorded else None for b, selector in enumerate(plan.selectors)]
            own_slices = [self._gradients[i] for i in layout.sparse]
            self._embeddings = Embeddings(plan, own_slices, self._group("slices"), self._seeds[len(layout.buckets) :])

            # 2. Uncompressed gradients
            dense, agreed, counts = self._reduce_uncompressed()
            reduced: dict[int, Any] = {}
            for tensors, result in zip(layout.uncompressed, dense):
                reduced |= {i: self._with_momentum(i, t) for i, t in zip(tensors.members, result.tensors)}
            keeps_state = bool(layout.param_groups or self._embeddings.has_residuals or state.velocities)
            sums = [tensor for result in dense for tensor in result.incoming]
            if plan.settings.delay:  # the sums are those of the step before
                sums = [self._gradients[i] for i in layout.uncompressed_members]
            flags = _finite(sums) if keeps_state else []

            # 3. Embeddings
            sparse = self._embeddings.reduce(counts)
            reduced |= dict(zip(layout.sparse, sparse))
            flags += [nonfinite.all_finite([slices]) for slices in sparse if keeps_state]

            # 4. and 5. Buckets. Uncompressed gradients are sent before the last one, so that they overlap with it.
            before_last = [tensor for result in dense for tensor in result.outgoing]
            gradients, times_and_norms, committed, probe = self._reduce_compressed(before_last, flags)
            reduced |= gradients

            # 6. Observers
            buckets = [
                BucketMeasurement(*times_and_norms[b], choice) if times_and_norms[b][0] else None
                for b, choice in enumerate(choices)
            ]
            others = self._measure_others(dense, own_slices, sparse) if plan.is_recorded else []
            nbytes = self._embeddings.bytes_sent
            measured = StepMeasurement(step, committed, ready, buckets, others, nbytes, agreed, probe, own)
            for observer in plan.observers:
                observer.observe(measured)

            with tf.control_dependencies(self._begun):
                state.step.assign_add(1)
                self._advance()
        return [reduced.get(i) for i in range(len(self._gradients))]

    def _advance(self) -> None:
        """Adds this step to `State.progress`."""
        state = self._plan.state
        with tf.device("CPU"):
            for count, progress in state.progress.items():
                steps = self._plan.settings.steps_per(count)
                if steps is not None:
                    progress.assign_add(1.0 / steps)
                elif state.pace is not None and count == "training":
                    per_step, limit = tf.unstack(state.pace.read_value())
                    progress.assign(tf.maximum(progress, tf.minimum(progress + per_step, limit)))

    # 2. Uncompressed gradients

    def _reduce_uncompressed(self) -> tuple[list[uncompressed.Dense], tf.Tensor | None, list[tf.Tensor]]:
        """The reduced gradients, the reduced numbers of `auto` (or None), and the reduced counts of embeddings."""
        measures = self._plan.auto or self._plan.delay_selector
        with tf.control_dependencies(self._context.data):  # if they are sent alone
            numbers = [*([] if measures is None else [measures.numbers()]), *self._embeddings.counts]
        results, agreed = [], list[tf.Tensor]()
        for b, tensors in enumerate(self._plan.layout.uncompressed):
            gradients = self._to_exchange(tensors.members)
            # The numbers are sent with the first bucket.
            result = self._allreduce([*gradients, *numbers], f"dense_{b}")
            if numbers:
                agreed, numbers = result.tensors[len(gradients) :], []
                del result.tensors[len(gradients) :]
            results.append(result)
        if numbers:
            agreed = self._allreduce(numbers, "agreed").tensors
        return results, None if measures is None else agreed.pop(0), agreed

    def _to_exchange(self, members: Sequence[int]) -> list[tf.Tensor]:
        """These uncompressed gradients; with a delay, those of the step before, and these wait."""
        gradients, variables = [self._gradients[i] for i in members], self._plan.state.waiting_gradients
        if not variables:
            return gradients
        with tf.control_dependencies(self._context.data):
            waiting = [variables[i].read_value() for i in members]
        exchanged, kept = delay.take_turns(gradients, waiting, self._context.is_warm_up)
        self._waiting += zip((variables[i] for i in members), kept)
        return exchanged

    def _allreduce(self, tensors: Sequence[tf.Tensor], name: str) -> uncompressed.Dense:
        settings = self._plan.settings
        return uncompressed.reduce(tensors, settings.op, settings.gradient_predivide_factor, self._group(name))

    def _with_momentum(self, i: int, reduced: tf.Tensor) -> tf.Tensor:
        """The velocity in place of an uncompressed gradient, the same on all ranks; without momentum, the gradient."""
        variable = self._plan.state.velocities.get(i)
        if variable is None:
            return reduced
        velocity = self._plan.transforms.after_allreduce(reduced, variable.read_value())
        assert velocity is not None
        self._changes.append((variable, velocity))
        return tf.cast(velocity, reduced.dtype)

    # 4. Buckets

    def _reduce_compressed(
        self, before_last: Sequence[tf.Tensor], flags: list[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], dict[int, tuple[Any, Any]], tf.Tensor, Any]:
        """Reduces all buckets and assigns the new state.

        Returns:
            Reduced gradients by their positions; timestamps and norms of each bucket, () where not taken; whether the
            new state was assigned; the result of `ModelSelector.probe`.
        """
        layout, auto = self._plan.layout, self._plan.auto
        fixed = [b for b in range(len(layout.buckets)) if b not in layout.auto_buckets]
        first = self._reduce_buckets(fixed, [] if layout.auto_buckets else before_last)
        gradients, measured = self._unpack(first), _measured(first)
        if auto is None:
            return gradients, measured, self._commit(flags, first), None

        with tf.control_dependencies(self._begun):
            probe = auto.probe(self._seeds[len(layout.buckets)], self._gradients)
        after = [first[fixed[-1]].next_can_start] if fixed else []

        def per_bucket() -> Any:
            last = self._reduce_buckets(layout.auto_buckets, before_last, after)
            committed = self._commit(flags, {**first, **last})
            return self._unpack(last), _measured(last), committed

        def without_compression() -> Any:
            reduced, timestamps, sums = self._reduce_auto_uncompressed()
            measured = {b: (times, self._lossless()) for b, times in timestamps.items()}
            keeps_state = first or self._changes or self._embeddings.has_residuals
            finite = _finite(sums) if keeps_state else []
            return reduced, measured, self._commit([*flags, *finite], first)

        def model_wide(candidate: int) -> Any:
            group, sample = self._groups("whole"), self._sample_norms
            seeds = self._seeds[layout.auto_buckets[-1]]
            result = reduce_model(
                self._plan, self._gradients, candidate, self._context, seeds, group, [*after, *before_last], sample
            )
            committed = self._commit([*flags, result.ok], first, result.changes)
            return result.gradients, dict(zip(layout.auto_buckets, result.measured)), committed

        reduced, others, committed = auto.switch_model(per_bucket, without_compression, model_wide)
        return gradients | reduced, measured | others, committed, probe

    def _reduce_buckets(
        self, buckets: Sequence[int], before_last: Sequence[tf.Tensor], after: Sequence[tf.Tensor] = ()
    ) -> dict[int, BucketResult]:
        """One bucket waits for the other: TensorFlow would encode all of them before it sends the first."""
        results: dict[int, BucketResult] = {}
        for b in buckets:
            if b == buckets[-1]:
                after = [*after, *before_last]
            bucket = self._bucket(b)
            gradients = [self._gradients[i] for i in bucket.layout.tensors.members]
            results[b] = reduce_bucket(bucket, gradients, self._context, after)
            # When TensorFlow inlines a function, a control dependency on one of its results becomes one on the whole
            # call. An identity keeps it on the result.
            after = [tf.identity(results[b].next_can_start)]
        return results

    def _bucket(self, b: int) -> BucketInput:
        plan, sample = self._plan, self._sample_norms
        return BucketInput(
            plan.layout.group_of(b).layout,
            plan.layout.buckets[b].chunks,
            plan.selectors[b],
            self._seeds[b],
            self._groups(f"bucket_{b}"),
            plan.state.of_bucket(plan.layout, b),
            b,
            any(observer.wants_times(b) for observer in plan.observers),
            no_measure if sample is None else functools.partial(norms.of_bucket, sample),
        )

    def _reduce_auto_uncompressed(
        self,
    ) -> tuple[dict[int, tf.Tensor], dict[int, clock.Timestamps], list[tf.Tensor]]:
        """The gradients of `auto`, reduced as by stock Horovod, their buckets' timestamps, and what was received."""
        layout = self._plan.layout
        gradients: dict[int, tf.Tensor] = {}
        timestamps: dict[int, clock.Timestamps] = {}
        sums: list[tf.Tensor] = []
        for b in layout.auto_buckets:
            of_group = layout.group_of(b).layout
            assert isinstance(of_group, FlatLayout)
            members = [of_group.tensors.members[i] for i in of_group.beginning_in(layout.buckets[b].chunks)]
            if not members:  # a part of a large gradient, which was reduced with the bucket before
                before = timestamps[b - 1]
                timestamps[b] = before._replace(ready=before.encoded, received=before.decoded)
                continue
            tensors = [self._gradients[i] for i in members]
            ready = clock.stamp(tensors[-1:])
            with tf.control_dependencies(clock.waited_for([ready])):  # or TensorFlow may read the clock too late
                tensors = [tf.identity(tensor) for tensor in tensors]
            result = self._allreduce(tensors, f"plain_{b}")
            received = clock.stamp(result.incoming, ready)
            timestamps[b] = clock.Timestamps(ready, ready, received, received)
            gradients |= dict(zip(members, result.tensors))
            sums += result.incoming
        return gradients, timestamps, sums

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

    def _commit(self, flags: Sequence[tf.Tensor], results: Mapping[int, BucketResult], more: Changes = ()) -> tf.Tensor:
        """Assigns the new state if all gradients of all ranks were finite; returns whether they were, a bool scalar.

        What waits is assigned in any case: its flag says whether it is finite.
        """
        changes, waiting = [*self._changes, *more], list(self._waiting)
        for b, result in results.items():
            old = self._plan.state.of_bucket(self._plan.layout, b)
            waiting += zip(old.waiting, result.new_state.waiting)
            for variables, values in zip(old._replace(waiting=[]), result.new_state._replace(waiting=[])):
                changes += zip(variables, values)
        _assign(waiting)
        flags = [*flags, *(result.ok for result in results.values())]
        if not flags:
            return tf.constant(True)
        ok = tf.reduce_all(tf.stack(flags))
        if not changes and not self._embeddings.has_residuals:
            return ok

        def assign() -> tf.Tensor:
            _assign(changes)
            self._embeddings.assign_residuals()
            return tf.constant(True)

        return tf.cond(ok, assign, lambda: tf.constant(False))

    # 6. Observers

    def _all_ready(self) -> tf.Tensor:
        """The time when the last gradients are ready, those of the first layers; float64 scalar."""
        layout = self._plan.layout
        groups = [*(group.layout.tensors for group in layout.param_groups), *layout.uncompressed]
        last = [*(tensors.members[-1] for tensors in groups), *layout.sparse]
        return clock.stamp([values_of(self._gradients[i]) for i in dict.fromkeys(last)])

    def _measure_others(
        self, dense: Sequence[uncompressed.Dense], own: Sequence[tf.IndexedSlices], reduced: Sequence[tf.IndexedSlices]
    ) -> list[BucketMeasurement]:
        """The measurements of uncompressed gradients, then of embeddings."""
        plan = self._plan
        norms_of_all = [self._lossless() for _ in dense]
        norms_of_all += [()] * len(own) if self._sample_norms is None else self._embeddings.norms(self._sample_norms)
        sent_and_received = [(result.outgoing, result.incoming) for result in dense]
        sent_and_received += [([before.values], [after.values]) for before, after in zip(own, reduced)]
        measurements = []
        choices = [False] * len(dense) + [
            now is not table for now, table in zip(plan.embeddings, plan.layout.embeddings)
        ]
        for (outgoing, incoming), of_both, choice in zip(sent_and_received, norms_of_all, choices):
            ready = clock.stamp(outgoing)
            received = clock.stamp(incoming, ready)
            times = clock.Timestamps(ready, ready, received, received)
            measurements.append(BucketMeasurement(times, of_both, tf.constant(int(choice))))
        return measurements

    def _lossless(self) -> Any:
        return () if self._sample_norms is None else norms.lossless(self._sample_norms)

    # Names of collectives

    def _group(self, what: str) -> Group:
        # Without TensorFlow's name scopes: inside a tf.cond, a scope ends with a number that counts all traces of the
        # process, and one rank may have traced more than the others.
        name = f"{self._plan.name}_{self._trace_index}_{what}"
        return Group(self._plan.settings.process_set, name, ignore_name_scope=True)

    def _groups(self, what: str) -> Callable[[Compressor], Group]:
        return lambda compressor: self._group(f"{what}_{plain_name(compressor.spec)}")


def _assign(changes: Changes) -> None:
    for variable, value in changes:
        with tf.device(variable.device):
            variable.assign(value)


def _finite(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [all_finite(tensor) for tensor in tensors if tensor.dtype.is_floating]


def _measured(results: Mapping[int, BucketResult]) -> dict[int, tuple[Any, Any]]:
    return {b: (result.timestamps, result.measured) for b, result in results.items()}
