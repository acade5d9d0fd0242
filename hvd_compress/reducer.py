"""One step: gradients into buckets, residual added, compressed, exchanged, cut up again."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from . import buckets, host_memory, residual
from .buckets import Bucket
from .compressors import NoCompression, Seeds
from .exchange import choice, uncompressed
from .exchange.common import Group, Share
from .kernels import noise
from .pieces import LARGEST, SMALLEST, FlatPieces, WholeTensors
from .settings import Settings

_instances = itertools.count()
# Into how many buckets a model is divided at least, unless they became smaller than so many bytes of float32.
_BUCKETS = 4
_SMALL_BUCKET = 2**20


@dataclasses.dataclass
class LayoutState:
    """What a rank keeps of a layout's pieces from step to step, in their shapes; never broadcast."""

    residuals: list[tf.Variable]  # of `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # float32; empty without momentum correction

    def part(self, pieces: range) -> LayoutState:
        """The state of some of the pieces."""
        part = slice(pieces.start, pieces.stop)
        return LayoutState(self.residuals[part], self.velocities[part])


class Reducer:
    """Reduces lists of gradients over the ranks, and keeps their residuals.

    A plan (buckets and residuals) belongs to a list of variables and lives as long as the reducer.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plans: dict[Any, Plan] = {}
        # Horovod matches collectives by name: two reducers must not share theirs. All ranks make
        # their reducers in the same order.
        self._name = f"hvdc_{next(_instances)}_{_plain(settings.name)}"

    @tf.autograph.experimental.do_not_convert  # has nothing to convert, which takes twice as long as tracing
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, averaged or summed over the ranks of the process set.

        Args:
            gradients: Tensors, IndexedSlices or None, one for each of `variables`.
            variables: What the gradients belong to. Residuals are kept for this list of variables.

        Returns:
            As `gradients`, in shape and dtype. On a rank outside of the process set, and where it has
            only one rank, the gradients themselves.

        Raises:
            ValueError: Horovod is not initialized.
            RuntimeError: Called inside an XLA-compiled step.
        """
        check_not_in_xla()
        process_set = self.settings.process_set
        hvd.size()  # raises Horovod's own error where hvd.init() was not called
        if not process_set.included() or process_set.size() == 1:
            return list(gradients)
        if self.settings.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        key = tuple(
            (id(v), None if g is None else (isinstance(g, tf.IndexedSlices), g.dtype))
            for g, v in zip(gradients, variables)
        )
        if key not in self.plans:
            host_memory.keep_freed_memory()
            with tf.init_scope():
                self.plans[key] = Plan(f"{self._name}_{len(self.plans)}", self.settings, gradients, variables)
        return self.plans[key].run(list(gradients))


class Plan:
    """How one list of gradients is reduced.

    Attributes:
        layouts: What is compressed, as the pieces that the compressor sees.
        states: The residuals of the pieces, one state per layout.
        buckets: Which pieces of which layout cross at once.
        dense: Positions of the gradients that are reduced uncompressed, in buckets of their own.
        sparse: Positions of IndexedSlices.
    """  # keeps no reference to the variables: they may go before it does

    def __init__(
        self, name: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        self.name = name
        self.settings = settings
        self.shapes = [_static_shape(g, v) for g, v in zip(gradients, variables)]
        self.dtypes: list[Any] = [None if g is None else g.dtype for g in gradients]
        self.sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        tensors = [i for i, g in enumerate(gradients) if g is not None and i not in self.sparse]
        chosen = [i for i in tensors if self._is_compressed(i)]
        groups = _positions(settings.groups, variables)
        # Without groups all go end to end, and buckets end where a piece does.
        whole = buckets.assign(self.shapes, chosen, sys.maxsize, groups)
        self.layouts = [self._layout(members) for members in whole]
        self.buckets = [
            (layout, pieces)
            for layout in self.layouts
            for pieces in layout.in_buckets(self._limit(layout.bucket))
        ]
        rest = [i for i in tensors if i not in set(chosen)]
        limit = self._limit(Bucket(tuple(rest), tuple(self.shapes[i] for i in rest)))
        self.dense = buckets.assign(self.shapes, rest, limit, None if chosen else groups)
        self.states = [self._new_state(layout.shapes) for layout in self.layouts]
        self.step = _variable(tf.constant(0, tf.int64), f"{name}_step")
        self._function = tf.function(self._run, autograph=False)

    def run(self, gradients: list[Any]) -> list[Any]:
        """Reduces the gradients, in a graph of its own when called eagerly."""
        return self._function(gradients) if tf.executing_eagerly() else self._run(gradients)

    def _run(self, gradients: list[Any]) -> list[Any]:
        reduced: list[Any] = [None] * len(gradients)
        oks, commits = [], []
        with tf.name_scope(self.name), tf.device(self.settings.device_dense):
            dense = [self._reduce_dense(gradients, b) for b in range(len(self.dense))]
            for bucket, result in zip(self.dense, dense):
                for i, tensor in zip(bucket.members, result.tensors):
                    reduced[i] = tensor
                if self.layouts:
                    oks += [residual.all_finite(t) for t in result.incoming if t.dtype.is_floating]
            b = 0
            after: list[tf.Tensor] = []
            for layout, state in zip(self.layouts, self.states):
                members = layout.bucket.members
                totals: list[tf.Tensor] = []
                for chosen in (pieces for owner, pieces in self.buckets if owner is layout):
                    # One bucket after the other: TensorFlow would encode them all before it sends the first.
                    # The dense ones go before the last, so as not to cross all alone after it.
                    if b == len(self.buckets) - 1:
                        after += [tensor for result in dense for tensor in result.outgoing]
                    with tf.control_dependencies(after):
                        pieces = layout.cut([gradients[i] for i in members], chosen)
                    total, ok, changes, outgoing = self._reduce_bucket(pieces, state.part(chosen), b)
                    after = [outgoing]
                    totals += total
                    oks.append(ok)
                    commits += changes
                    b += 1
                for i, result in zip(members, layout.join(totals, [self.dtypes[i] for i in members])):
                    reduced[i] = result
            self._commit(oks, commits)
            for i in self.sparse:
                reduced[i] = hvd.allreduce(
                    gradients[i],
                    device_sparse=self.settings.device_sparse,
                    op=self.settings.op,
                    process_set=self.settings.process_set,
                )
        return reduced

    def _reduce_dense(self, gradients: Sequence[Any], index: int) -> uncompressed.Dense:
        bucket = self.dense[index]
        return uncompressed.reduce(
            [tf.ensure_shape(gradients[i], self.shapes[i]) for i in bucket.members],
            self.settings.op,
            self.settings.gradient_predivide_factor,
            self.settings.process_set,
            f"{self.name}_dense_{index}",
        )

    def _reduce_bucket(
        self, pieces: list[tf.Tensor], state: LayoutState, index: int
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[tuple[tf.Variable, tf.Tensor]], tf.Tensor]:
        """The bucket's reduced pieces, whether all are finite, what to keep in which variable, what is sent."""
        settings = self.settings
        shapes = [tuple(piece.shape.as_list()) for piece in pieces]
        predivide = settings.gradient_predivide_factor
        if predivide != 1.0:
            pieces = [piece / predivide for piece in pieces]
        residuals: list[Any] = [variable.value() for variable in state.residuals] or [None] * len(pieces)
        decay = settings.residual_decay
        velocities: list[tf.Tensor] = []
        if state.velocities:
            velocities = [
                residual.accelerate(piece, variable.value(), settings.momentum_correction)
                for piece, variable in zip(pieces, state.velocities)
            ]
            # The sum itself is needed to see what was sent.
            pieces = [residual.add(v, r, decay) for v, r in zip(velocities, residuals)]
            residuals, decay = [None] * len(pieces), 1.0
        ranks = settings.process_set.size()
        scale = predivide / ranks if settings.op == hvd.Average else 1.0
        share = Share(pieces, residuals, decay, bool(state.residuals), self._seeds(index))
        group = Group(settings.process_set, f"{self.name}_bucket_{index}")
        pattern = choice.choose(settings.compressor, shapes, ranks)
        total, left, ok, outgoing = pattern.reduce(settings.compressor, share, scale, group)
        changes = [(v, tf.cast(new, v.dtype)) for v, new in zip(state.residuals, left)]
        for variable, velocity, piece, new in zip(state.velocities, velocities, pieces, left):
            changes.append((variable, residual.mask(velocity, piece - new)))
        return total, ok, changes, outgoing

    def _commit(self, oks: Sequence[tf.Tensor], changes: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
        """Keeps the new residuals, unless any gradient of any rank was not finite."""
        self.step.assign_add(1)
        if not changes:
            return

        def keep() -> tf.Tensor:
            for variable, value in changes:
                variable.assign(value)
            return tf.constant(True)

        tf.cond(tf.reduce_all(tf.stack(oks)), keep, lambda: tf.constant(False))

    def _seeds(self, index: int) -> Seeds:
        shared = noise.fold(tf.cast(self.step, tf.int32), index)
        return Seeds(shared, noise.fold(shared, self.settings.process_set.rank() + 1))

    def _limit(self, members: Bucket) -> int:
        """Bytes of float32 that cross at once at most.

        Small models are divided, too, so that their last layers cross while the backward pass is at the first.
        """
        if self.settings.groups is not None:
            return sys.maxsize
        # A little more than a quarter, for what pieces are filled up with.
        return min(self.settings.bucket_bytes, max(_SMALL_BUCKET, math.ceil(4.1 * members.numel / _BUCKETS)))

    def _layout(self, members: Bucket) -> FlatPieces | WholeTensors:
        """The pieces in which the compressor sees these gradients."""
        compressor, ranks = self.settings.compressor, self.settings.process_set.size()
        if compressor.per_tensor:
            return WholeTensors(members)
        limit = self._limit(members)

        def pieces_for(owners: int) -> FlatPieces:
            size = max(SMALLEST, min(LARGEST, limit // 4 // owners))
            return FlatPieces(members, owners, compressor.alignment, size)

        shared = pieces_for(ranks)
        bucket = max(map(len, shared.in_buckets(limit)))
        if choice.choose(compressor, shared.shapes[:bucket], ranks) is choice.scatter_reduce:
            return shared
        return pieces_for(1)

    def _is_compressed(self, i: int) -> bool:
        if isinstance(self.settings.compressor, NoCompression) or not self.dtypes[i].is_floating:
            return False
        size = math.prod(self.shapes[i])
        if self.settings.min_compress_size == 0:
            return size > 0
        return len(self.shapes[i]) > 1 and size >= self.settings.min_compress_size

    def _new_state(self, shapes: Sequence[tuple[int, ...]]) -> LayoutState:
        def zeros(what: str, dtype: str) -> list[tf.Variable]:
            with tf.device(self.settings.device_dense):
                return [_variable(tf.zeros(shape, dtype), f"{self.name}_{what}") for shape in shapes]

        return LayoutState(
            zeros("residual", self.settings.residual_dtype) if self.settings.feeds_back else [],
            zeros("velocity", "float32") if self.settings.momentum_correction else [],
        )

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: as configured, and if nothing were compressed.

        As a ring sends them; what IndexedSlices cost depends on the batch and is not counted.
        """
        ranks = self.settings.process_set.size()
        plain = {
            i: math.prod(self.shapes[i]) * self.dtypes[i].size
            for bucket in (*(layout.bucket for layout in self.layouts), *self.dense)
            for i in bucket.members
        }
        dense = sum(plain[i] for bucket in self.dense for i in bucket.members)
        sent = uncompressed.bytes_sent(dense, ranks)
        compressor = self.settings.compressor
        for layout, pieces in self.buckets:
            shapes = layout.shapes[pieces.start : pieces.stop]
            sent += choice.choose(compressor, shapes, ranks).bytes_sent(compressor, shapes, ranks)
        return sent, uncompressed.bytes_sent(sum(plain.values()), ranks)


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    # Not lifted out of the function that is being traced, which would trace it a second time; a plan is made
    # in an init_scope.
    return tf.Variable(value, trainable=False, name=name, experimental_enable_variable_lifting=False)


def check_not_in_xla() -> None:
    """Refuses to put collectives into an XLA-compiled function.

    Raises:
        RuntimeError: The current graph is compiled with `jit_compile=True`.
    """
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise RuntimeError(
            "the training step is compiled with jit_compile=True, and Horovod's collectives do not exist inside "
            "XLA: pass jit_compile=False to model.compile() or tf.function() (hvd_compress compiles its own "
            "kernels; on a GPU, Keras 3 sets jit_compile=True unless told otherwise)"
        )


def _static_shape(gradient: Any, variable: Any) -> tuple[int, ...]:
    if gradient is None:
        return ()
    shape = gradient.shape if gradient.shape.is_fully_defined() else tf.TensorShape(variable.shape)
    if isinstance(gradient, tf.IndexedSlices):
        return ()
    if not shape.is_fully_defined():
        raise ValueError(
            f"the gradient of {getattr(variable, 'name', variable)} has the unknown shape {shape}: "
            "set it with tf.ensure_shape"
        )
    return tuple(shape.as_list())


def _positions(groups: Any, variables: Sequence[Any]) -> Any:
    """Groups of variables as groups of their positions in `variables`."""
    if not isinstance(groups, (list, tuple)):
        return groups
    position = {id(variable): i for i, variable in enumerate(variables)}
    return [[position[id(v)] for v in group if id(v) in position] for group in groups]


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def scale_local_gradient(gradient: Any, size: int) -> Any:
    """A local variable's gradient divided by the number of ranks, as Horovod does."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / size
