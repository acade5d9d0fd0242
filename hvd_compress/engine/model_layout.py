"""How the gradients of a model are divided: which are compressed together, in which buckets. Numbers only.

A parameter group holds gradients that share a compressor, packed into chunks. A bucket is a run of a group's chunks,
which are exchanged together. Buckets are in the order of sending: the groups of `auto` after all others and, within a
group, the last layers first, since their gradients are ready first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common import checks
from ..common.names import path_of
from ..compressors import Compressor, NoCompression
from .embedding_table import EmbeddingTable
from .grouping import Shape, TensorGroup, assign, positions
from .layout import SMALL_BUCKET, Layout, PerTensorLayout, bucket_limit, flat_layout, is_compressed, smallest_bucket
from .settings import Settings


class ParamGroup(NamedTuple):
    """Gradients that share a compressor, and the chunks in which it sees them."""

    compressor: Compressor
    layout: Layout


class Bucket(NamedTuple):
    """Chunks that are exchanged together."""

    group: int  # position of the parameter group
    chunks: range


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """How one list of gradients is divided."""

    paths: Sequence[str]  # of the variables, or their names
    shapes: Sequence[Shape]  # of the gradients
    dtypes: Sequence[Any]  # of the gradients; None if there is no gradient
    param_groups: Sequence[ParamGroup]  # the compressed gradients
    buckets: Sequence[Bucket]  # of all parameter groups, in the order of sending
    uncompressed: Sequence[TensorGroup]  # the buckets of Horovod's own allreduce
    sparse: Sequence[int]  # positions of the gradients that are IndexedSlices
    embeddings: Sequence[EmbeddingTable]  # the tables of these gradients, in the same order
    may_be_hierarchical: bool  # whether exchanges may sum gradients within each host first

    def group_of(self, b: int) -> ParamGroup:
        """The parameter group of a bucket."""
        return self.param_groups[self.buckets[b].group]

    def shapes_of(self, b: int) -> Sequence[Shape]:
        """The shapes of a bucket's chunks."""
        chunks = self.buckets[b].chunks
        return self.group_of(b).layout.shapes[chunks.start : chunks.stop]

    @property
    def uncompressed_members(self) -> list[int]:
        """Positions of the gradients that Horovod's own allreduce reduces."""
        return [i for tensors in self.uncompressed for i in tensors.members]

    @property
    def auto(self) -> Any:
        """The compressor `auto`, which stands for a choice among candidates; None if it is not used."""
        return next((group.compressor for group in self.param_groups if group.compressor.automatic), None)

    @functools.cached_property
    def auto_groups(self) -> list[int]:
        """Positions of the parameter groups of `auto`."""
        return [g for g, group in enumerate(self.param_groups) if group.compressor.automatic]

    @functools.cached_property
    def auto_buckets(self) -> list[int]:
        """Positions of the buckets of `auto`, which are the last ones."""
        return [b for b, bucket in enumerate(self.buckets) if bucket.group in self.auto_groups]

    @functools.cached_property
    def model_wide(self) -> PerTensorLayout:
        """The gradients of `auto` in their own shapes, one parameter group after the other."""
        groups = [self.param_groups[g].layout.tensors for g in self.auto_groups]
        members = tuple(i for tensors in groups for i in tensors.members)
        return PerTensorLayout(TensorGroup(members, tuple(shape for t in groups for shape in t.shapes)))


def model_layout(
    settings: Settings, gradients: Sequence[Any], variables: Sequence[Any], workers: int = 1
) -> ModelLayout:
    """Divides gradients (tensors, IndexedSlices or None).

    Args:
        settings: The user's settings.
        gradients: One for each of `variables`.
        variables: The gradients' variables.
        workers: The workers on each host if exchanges may be hierarchical, else 1.

    Raises:
        TypeError: Horovod cannot reduce the dtype of a gradient.
        ValueError: The shape of a gradient is unknown, or does not match that of its variable.
    """
    shapes = [_static_shape(g, v) for g, v in zip(gradients, variables)]
    paths = [path_of(v) for v in variables]
    dtypes: list[Any] = [None if g is None else g.dtype for g in gradients]
    for path, dtype in zip(paths, dtypes):
        if dtype is not None:
            checks.reducible(f"the gradient of {path or 'a tensor'}", dtype)
    compressors = [settings.compressor_of(path) for path in paths]
    ranks = settings.process_set.size()
    waits_for_gradients = not settings.delay and settings.local_steps is None
    early = smallest_bucket(ranks) if waits_for_gradients and not settings.on_gpu else SMALL_BUCKET

    def limit_of(numel: int, smallest: int = SMALL_BUCKET) -> int:
        return sys.maxsize if settings.groups is not None else bucket_limit(settings.bucket_bytes, numel, smallest)

    def is_sent_compressed(i: int) -> bool:
        may_be = dtypes[i].is_floating and not compressors[i].uncompressed
        return may_be and is_compressed(shapes[i], settings.min_compress_size)

    def layout_of(tensors: TensorGroup, compressor: Compressor) -> Layout:
        if compressor.per_tensor:
            return PerTensorLayout(tensors)
        limit = limit_of(tensors.numel, early)
        return flat_layout(tensors, compressor.candidates, limit, ranks, workers, settings.on_gpu)

    def table_of(i: int) -> EmbeddingTable:
        compressor = compressors[i].for_rows() if is_sent_compressed(i) else NoCompression()
        automatic = compressors[i].automatic and not compressor.uncompressed
        given = gradients[i].indices.shape[0]
        max_rows = shapes[i][0] if given is None else min(shapes[i][0], given)
        limit = limit_of(math.prod(shapes[i]))
        return EmbeddingTable(shapes[i], dtypes[i], compressor, ranks, limit, settings.on_gpu, max_rows, automatic)

    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    compressed = [i for i in dense if is_sent_compressed(i)]
    groups = positions(settings.groups, variables)

    distinct: list[Compressor] = []
    for i in compressed:
        if compressors[i] not in distinct:  # may have no hash
            distinct.append(compressors[i])
    param_groups = []
    # In the order of the variables, but `auto` last.
    for compressor in sorted(distinct, key=lambda c: c.automatic):
        members = [i for i in compressed if compressors[i] == compressor]
        # Without `groups`, there is one parameter group for each compressor.
        for tensors in assign(shapes, members, sys.maxsize, groups):
            param_groups.append(ParamGroup(compressor, layout_of(tensors, compressor)))
    buckets = []
    for g, group in enumerate(param_groups):
        limit = sys.maxsize if group.compressor.model_wide else limit_of(group.layout.tensors.numel, early)
        buckets += [Bucket(g, chunks) for chunks in group.layout.in_buckets(limit)]

    rest = sorted(set(dense) - set(compressed))
    # Beside compressed gradients, the others are sent before the last bucket.
    limit = limit_of(sum(math.prod(shapes[i]) for i in rest), SMALL_BUCKET if compressed else early)
    uncompressed = assign(shapes, rest, limit, None if compressed else groups)
    tables = [table_of(i) for i in sparse]
    return ModelLayout(paths, shapes, dtypes, param_groups, buckets, uncompressed, sparse, tables, workers > 1)


def _static_shape(gradient: Any, variable: Any) -> tuple[int, ...]:
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        # The number of rows depends on the batch.
        gradient = tf.TensorSpec(tf.TensorShape([None]).concatenate(gradient.values.shape[1:]))
    path, shape, own = path_of(variable), gradient.shape, tf.TensorShape(variable.shape)
    if not shape.is_compatible_with(own):
        raise ValueError(f"the gradient of {path} has shape {shape}, the variable {own}")
    shape = shape.merge_with(own)
    if not shape.is_fully_defined():
        raise ValueError(f"the gradient of {path} has the unknown shape {shape}: set it with tf.ensure_shape")
    return tuple(shape.as_list())
