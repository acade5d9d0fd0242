"""One step: gradients into buckets, residual added, compressed, exchanged, cut up again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from . import buckets, residual
from .buckets import Bucket
from .compressors import NoCompression, Seeds
from .exchange import choice, uncompressed
from .exchange.common import Group, Share
from .kernels import noise
from .pieces import FlatPieces, WholeTensors
from .settings import Settings

_instances = itertools.count()


@dataclasses.dataclass
class BucketState:
    """What a rank keeps of a bucket from step to step, in the shapes of its pieces; never broadcast."""

    residuals: list[tf.Variable]  # of `residual_dtype`; empty without error feedback
    velocities: list[tf.Variable]  # float32; empty without momentum correction


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
            with tf.init_scope():
                self.plans[key] = Plan(f"{self._name}_{len(self.plans)}", self.settings, gradients, variables)
        return self.plans[key].run(list(gradients))


class Plan:
    """How one list of gradients is reduced.

    Attributes:
        buckets: What is compressed.
        pieces: How the compressor sees each bucket.
        states: The residuals, one state per bucket.
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
        self.buckets = buckets.assign(self.shapes, chosen, settings.bucket_bytes, groups)
        rest = [i for i in tensors if i not in set(chosen)]
        self.dense = buckets.assign(self.shapes, rest, settings.bucket_bytes, None if chosen else groups)
        self.pieces = [self._pieces(bucket) for bucket in self.buckets]
        self.states = [self._new_state(pieces.shapes) for pieces in self.pieces]
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}_step")
        self._function = tf.function(self._run, autograph=False)

    def run(self, gradients: list[Any]) -> list[Any]:
        """Reduces the gradients, in a graph of its own when called eagerly."""
        return self._function(gradients) if tf.executing_eagerly() else self._run(gradients)

    def _run(self, gradients: list[Any]) -> list[Any]:
        reduced: list[Any] = [None] * len(gradients)
        oks, commits = [], []
        with tf.name_scope(self.name), tf.device(self.settings.device_dense):
            for b, bucket in enumerate(self.buckets):
                pieces = self.pieces[b].cut([gradients[i] for i in bucket.members])
                total, ok, changes = self._reduce_bucket(pieces, b)
                results = self.pieces[b].join(total, [self.dtypes[i] for i in bucket.members])
                for i, result in zip(bucket.members, results):
                    reduced[i] = result
                oks.append(ok)
                commits += changes
            for b, bucket in enumerate(self.dense):
                results = uncompressed.reduce(
                    [gradients[i] for i in bucket.members],
                    self.settings.op,
                    self.settings.gradient_predivide_factor,
                    self.settings.process_set,
                    f"{self.name}_dense_{b}",
                )
                for i, result in zip(bucket.members, results):
                    reduced[i] = tf.ensure_shape(result, self.shapes[i])
                    if self.buckets and result.dtype.is_floating:
                        oks.append(residual.all_finite(result))
            self._commit(oks, commits)
            for i in self.sparse:
                reduced[i] = hvd.allreduce(
                    gradients[i],
                    device_sparse=self.settings.device_sparse,
                    op=self.settings.op,
                    process_set=self.settings.process_set,
                )
        return reduced

    def _reduce_bucket(
        self, pieces: list[tf.Tensor], index: int
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[tuple[tf.Variable, tf.Tensor]]]:
        """The bucket's reduced pieces, whether all are finite on all ranks, and what to keep in which variable."""
        settings, state = self.settings, self.states[index]
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
        pattern = choice.choose(settings.compressor, self.pieces[index].shapes, ranks)
        total, left, ok = pattern.reduce(settings.compressor, share, scale, group)
        changes = [(v, tf.cast(new, v.dtype)) for v, new in zip(state.residuals, left)]
        for variable, velocity, piece, new in zip(state.velocities, velocities, pieces, left):
            changes.append((variable, residual.mask(velocity, piece - new)))
        return total, ok, changes

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

    def _pieces(self, bucket: Bucket) -> FlatPieces | WholeTensors:
        """The pieces in which the compressor sees the bucket."""
        compressor, ranks = self.settings.compressor, self.settings.process_set.size()
        if compressor.per_tensor:
            return WholeTensors(bucket)
        shared = FlatPieces(bucket, multiple=ranks)
        if choice.choose(compressor, shared.shapes, ranks) is choice.scatter_reduce:
            return shared
        return FlatPieces(bucket)

    def _is_compressed(self, i: int) -> bool:
        if isinstance(self.settings.compressor, NoCompression) or not self.dtypes[i].is_floating:
            return False
        size = math.prod(self.shapes[i])
        if self.settings.min_compress_size == 0:
            return size > 0
        return len(self.shapes[i]) > 1 and size >= self.settings.min_compress_size

    def _new_state(self, shapes: Sequence[tuple[int, ...]]) -> BucketState:
        def zeros(what: str, dtype: str) -> list[tf.Variable]:
            with tf.device(self.settings.device_dense):
                return [
                    tf.Variable(tf.zeros(shape, dtype), trainable=False, name=f"{self.name}_{what}")
                    for shape in shapes
                ]

        return BucketState(
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
            for bucket in (*self.buckets, *self.dense)
            for i in bucket.members
        }
        dense = sum(plain[i] for bucket in self.dense for i in bucket.members)
        sent = uncompressed.bytes_sent(dense, ranks)
        compressor = self.settings.compressor
        for pieces in self.pieces:
            pattern = choice.choose(compressor, pieces.shapes, ranks)
            sent += pattern.bytes_sent(compressor, pieces.shapes, ranks)
        return sent, uncompressed.bytes_sent(sum(plain.values()), ranks)


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
