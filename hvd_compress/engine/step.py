"""One step: gradients into buckets, residual added, compressed, exchanged, cut up again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..auto import samples
from ..common import tracing
from ..compressors import error_feedback as residual
from ..exchange import uncompressed
from ..monitor import tuning
from . import clock, nonfinite
from . import model_wide as crossing_whole
from .clock import Stamps
from .context import Context
from .embeddings import SparseGradients
from .packing import FlatPacking
from .pipeline import BucketInput, BucketResult, cross
from .plan import Plan


class Step:
    """The graph of one step of a plan."""

    def __init__(self, plan: Plan, gradients: Sequence[Any], so_far: tf.Tensor | None = None) -> None:
        self._plan = plan
        self._so_far = so_far
        # Of static shape, also where only the variable's is.
        self._gradients = [
            tf.ensure_shape(g, shape) if isinstance(g, tf.Tensor) and not g.shape.is_fully_defined() else g
            for g, shape in zip(gradients, plan.shapes)
        ]
        self._recorder = plan.recorder
        self._changes: list[tuple[tf.Variable, tf.Tensor]] = []  # of the uncompressed gradients' velocities
        # How often the plan is part of the function that is being traced: names must differ there. Not of all
        # that is around it: a rank on which TensorFlow traces the function twice (it made Keras's metrics in it, and
        # the ranks that an elastic job had before did not) would wait for ever. Calls of functions are one
        # after the other, since they assign the same variables.
        graph = tracing.function_graph()
        turn = plan.turns.get(graph, -1) + 1
        plan.turns[graph] = turn
        self._context = Context(plan, turn, None)

    def run(self) -> list[Any]:
        """The reduced gradients."""
        gradients, plan = self._gradients, self._plan
        reduced: list[Any] = [None] * len(gradients)
        with tf.name_scope(plan.name), tf.device(plan.settings.device_dense):
            step = plan.step.read_value()
            if self._recorder is not None:
                self._context = dataclasses.replace(self._context, due=self._recorder.due())
            if self._so_far is not None and plan.progress is not None:
                plan.progress.assign(self._so_far)
            self._clip()
            ready = self._all_ready()
            before = None if plan.selector is None else plan.selector.choices()
            self._sparse = SparseGradients(
                plan, gradients, self._context.group("slices"), self._context.seeds
            )
            dense, agreed, told = self._reduce_dense()
            for bucket, result in zip(plan.dense, dense):
                for i, tensor in zip(bucket.members, result.tensors):
                    reduced[i] = self._accelerated(i, tensor)
            oks = []
            if plan.stateful_groups or plan.velocities:
                incoming = [tensor for result in dense for tensor in result.incoming]
                oks = [residual.all_finite(t) for t in incoming if t.dtype.is_floating]
            for i, found in zip(plan.sparse, self._sparse.reduce(told)):
                reduced[i] = found
                if plan.stateful_groups or plan.velocities:
                    oks.append(nonfinite.all_finite([found]))
            # The dense ones go before the last bucket, so as not to cross all alone after it.
            before_last = [tensor for result in dense for tensor in result.outgoing]
            fixed = [b for b in range(len(plan.buckets)) if b not in plan.chosen]
            crossed = self._cross(fixed, [] if plan.chosen else before_last)
            results = self._join(crossed)
            watched: dict[int, Any] = {b: (c.stamps, c.norms) for b, c in crossed.items()}
            if plan.selector is None:
                committed = self._commit(oks, crossed)
            else:
                probe = plan.selector.probe(
                    step, [samples.of_bucket(plan, self._gradients, b) for b in plan.chosen]
                )
                nothing = plan.selector.nothing_in_use()
                after = [crossed[fixed[-1]].outgoing] if fixed else []

                def compressed() -> Any:
                    mine = self._cross(plan.chosen, before_last, after)
                    committed = self._commit(oks, {**crossed, **mine})
                    norms = [mine[b].norms for b in plan.chosen]
                    return self._join(mine), [mine[b].stamps for b in plan.chosen], norms, committed, nothing

                def plain() -> Any:
                    found, stamps = self._cross_uncompressed()
                    norms = [self._context.nothing_lost() for _ in plan.chosen]
                    return found, stamps, norms, self._commit(oks, crossed), nothing

                def whole(candidate: int) -> Any:
                    assert plan.selector is not None
                    due = plan.selector.is_probed(step)
                    found = crossing_whole.cross(
                        self._context, self._gradients, candidate, [*after, *before_last], due
                    )
                    committed = self._commit([*oks, found.ok], crossed, found.changes)
                    return found.tensors, found.stamps, found.norms, committed, found.lost

                exchanged = plan.selector.switch_all(compressed, plain, whole)
                chosen, stamps, norms, committed, in_use = exchanged
                results |= chosen
                watched |= dict(zip(plan.chosen, zip(stamps, norms)))
                plan.selector.learn(step, agreed, stamps, probe, in_use, committed)
            for i, tensor in results.items():
                reduced[i] = tensor
            if self._recorder is not None:
                uncompressed_ones = self._watch_uncompressed(dense, [reduced[i] for i in plan.sparse])
                found = [*(watched[b] for b in sorted(watched)), *uncompressed_ones]
                choices = [plan.stage(param_group.compressor) for param_group, _ in plan.buckets]
                choices += [tf.constant(0)] * len(uncompressed_ones)
                for place, b in enumerate(plan.chosen):
                    assert before is not None
                    choices[b] = before[place]
                stamps, norms = ([pair[i] for pair in found] for i in range(2))
                self._recorder.record(step, committed, ready, stamps, norms, choices, self._sparse.bytes_sent)
            plan.step.assign_add(1)
            if plan.progress is not None and plan.settings.dgc is not None:
                steps = plan.settings.dgc.steps_per_epoch
                plan.progress.assign_add(0.0 if steps is None else 1.0 / steps)
            tuning.step(plan.name)
        return reduced

    def _clip(self) -> None:
        """Clips this rank's gradients, as `dgc` does."""
        dgc = self._plan.settings.dgc
        if dgc is not None and dgc.clipnorm is not None:
            limit = dgc.local_limit(
                self._plan.settings.process_set.size(), self._plan.settings.op == hvd.Average
            )
            self._gradients = residual.clipped(self._gradients, limit)

    def _accelerated(self, i: int, reduced: tf.Tensor) -> tf.Tensor:
        """What momentum makes of an uncompressed gradient, which is the same on all ranks."""
        variable = self._plan.velocities.get(i)
        if variable is None:
            return reduced
        momentum = self._plan.settings.momentum_correction
        velocity = momentum * variable.read_value() + tf.cast(reduced, tf.float32)
        self._changes.append((variable, velocity))
        return tf.cast(velocity, reduced.dtype)

    # What is measured while somebody watches

    def _all_ready(self) -> tf.Tensor | None:
        """When all gradients are there: those of the first layers are the last."""
        if self._recorder is None:
            return None
        plan = self._plan
        last = [param_group.layout.tensors.members[-1] for param_group in plan.param_groups]
        last += [bucket.members[-1] for bucket in plan.dense] + plan.sparse
        return clock.stamp([_values(self._gradients[i]) for i in dict.fromkeys(last)])

    def _watch_uncompressed(
        self, dense: Sequence[uncompressed.Dense], sparse: Sequence[Any]
    ) -> list[tuple[Stamps, tf.Tensor]]:
        """Stamps and norms of what crosses in no bucket; `sparse`: reduced IndexedSlices."""
        pairs = [(found.outgoing, found.incoming) for found in dense]
        pairs += [([self._gradients[i].values], [s.values]) for i, s in zip(self._plan.sparse, sparse)]
        norms = [self._context.nothing_lost() for _ in dense]
        norms += [] if self._context.due is None else self._sparse.norms(self._context.due)
        found = []
        for (outgoing, incoming), norm in zip(pairs, norms):
            ready = clock.stamp(outgoing)
            arrived = clock.stamp(incoming, ready)
            found.append((Stamps(ready, ready, arrived, arrived), norm))
        return found

    def _reduce_dense(self) -> tuple[list[uncompressed.Dense], Any, list[tf.Tensor]]:
        """The uncompressed gradients, and what the ranks tell each other, for the choice (or None) and of slices."""
        selector = self._plan.selector
        told = [*([] if selector is None else [selector.outgoing()]), *self._sparse.outgoing]
        found, agreed = [], list[tf.Tensor]()
        for b, bucket in enumerate(self._plan.dense):
            tensors = [self._gradients[i] for i in bucket.members]
            # What the ranks tell goes along with the first bucket.
            result = self._allreduce([*tensors, *told], f"dense_{b}")
            if told:
                agreed, told = result.tensors[len(tensors) :], []
                del result.tensors[len(tensors) :]
            found.append(result)
        if told:
            agreed = self._allreduce(told, "agreed").tensors
        return found, None if selector is None else agreed.pop(0), agreed

    def _allreduce(self, tensors: Sequence[tf.Tensor], name: str) -> uncompressed.Dense:
        settings = self._plan.settings
        group = self._context.group(name)
        return uncompressed.reduce(tensors, settings.op, settings.gradient_predivide_factor, group)

    def _cross_uncompressed(self) -> tuple[dict[int, tf.Tensor], list[Stamps]]:
        """The gradients of `auto` where nothing is to be compressed: as stock Horovod reduces them."""
        found: dict[int, tf.Tensor] = {}
        stamps: list[Stamps] = []
        for b in self._plan.chosen:
            param_group, chunks = self._plan.buckets[b]
            assert isinstance(param_group.layout, FlatPacking)
            members = [param_group.layout.tensors.members[i] for i in param_group.layout.beginning_in(chunks)]
            if not members:  # a large gradient that began in the bucket before
                stamps.append(Stamps(*[stamps[-1].done] * len(Stamps._fields)))
                continue
            tensors = [self._gradients[i] for i in members]
            ready = clock.stamp(tensors[-1:])
            with tf.control_dependencies([ready]):  # or TensorFlow may take the time after the exchange
                tensors = [tf.identity(tensor) for tensor in tensors]
            result = self._allreduce(tensors, f"plain_{b}")
            arrived = clock.stamp(result.incoming)
            stamps.append(Stamps(ready, ready, arrived, arrived))
            found |= dict(zip(members, result.tensors))
        return found, stamps

    def _cross(
        self,
        chosen: Sequence[int],
        before_last: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor] = (),
    ) -> dict[int, BucketResult]:
        """Compresses and exchanges buckets, one after the other.

        TensorFlow would encode them all before it sends the first.
        """
        crossed: dict[int, BucketResult] = {}
        for b in chosen:
            param_group, chunks = self._plan.buckets[b]
            members = param_group.layout.tensors.members
            if b == chosen[-1]:
                after = [*after, *before_last]
            begun: list[tf.Tensor] = []
            if param_group.compressor.automatic or self._recorder is not None:
                last = members[param_group.layout.reaching_into(chunks)[-1]]
                with tf.control_dependencies(after):
                    begun = [clock.stamp([self._gradients[last]])]
            with tf.control_dependencies([*after, *begun]):
                cut = param_group.layout.cut([self._gradients[i] for i in members], chunks)
            state = param_group.state.part(chunks)
            crossed[b] = cross(self._context, BucketInput(b, cut, state), begun)
            # Of a tensor that a function returns, TensorFlow takes nothing but the call to be waited for, once
            # it has dissolved the function in the graph.
            after = [tf.identity(crossed[b].early)]
        return crossed

    def _join(self, crossed: Mapping[int, BucketResult]) -> dict[int, tf.Tensor]:
        """The reduced gradients, by position."""
        results: dict[int, tf.Tensor] = {}
        for param_group in self._plan.param_groups:
            mine = [b for b in sorted(crossed) if self._plan.buckets[b][0] is param_group]
            if mine:
                members = param_group.layout.tensors.members
                chunks = [chunk for b in mine for chunk in crossed[b].chunks]
                results |= dict(
                    zip(members, param_group.layout.join(chunks, [self._plan.dtypes[i] for i in members]))
                )
        return results

    def _commit(
        self,
        oks: Sequence[tf.Tensor],
        crossed: Mapping[int, BucketResult],
        more: Sequence[tuple[tf.Variable, tf.Tensor]] = (),
    ) -> tf.Tensor:
        """Keeps the new residuals, unless any gradient of any rank was not finite; whether it did."""
        changes = [*self._changes, *more]
        for b, found in crossed.items():
            changes += zip(self._plan.changed_by(b), found.kept)
        flags = [*oks, *(found.ok for found in crossed.values())]
        if not flags:
            return tf.constant(True)
        ok = tf.reduce_all(tf.stack(flags))
        if not changes and not self._sparse.has_residuals:
            return ok

        def keep() -> tf.Tensor:
            for variable, value in changes:
                with tf.device(variable.device):
                    variable.assign(value)
            self._sparse.keep()
            return tf.constant(True)

        return tf.cond(ok, keep, lambda: tf.constant(False))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
