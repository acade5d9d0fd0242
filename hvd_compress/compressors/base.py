"""The base class of all compressors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import horovod.tensorflow.compression as horovod_compression
import tensorflow as tf

from ..formats.base import Shape, Traits, as_shape
from ..kernels.compile import Terms
from ..kernels.native import NativeFormat
from . import error_feedback as feedback
from .payload import nbytes
from .registry import parse


class Seeds(NamedTuple):
    """The sources of randomness in one step: two int32 scalars and a number."""

    shared: tf.Tensor  # the same on all ranks: for choices that ranks must agree on
    local: tf.Tensor  # different on each rank: for noise that averages out
    chunk: int = 0  # folded into the seed, so that each chunk draws different numbers


def no_seeds() -> Seeds:
    """The seeds of a round trip outside training: fixed, so that it can be repeated."""
    return Seeds(tf.constant(0, tf.int32), tf.constant(0, tf.int32))


class ChunkInput(NamedTuple):
    """What `Compressor.encode` takes."""

    gradient: tf.Tensor
    seeds: Seeds
    residual: tf.Tensor | None = None
    decay: float = 1.0
    keep: bool = False

    @property
    def shape(self) -> Shape:
        """The gradient's shape."""
        return tuple(self.gradient.shape.as_list())

    def sum(self) -> tf.Tensor:
        """Gradient + decay * residual."""
        return feedback.add(*self.terms())

    def terms(self, reshape: Callable[[tf.Tensor], tf.Tensor] = lambda x: x) -> Terms:
        """The terms of `sum`, for kernels that add them, with both tensors reshaped."""
        gradient = reshape(self.gradient)
        return gradient, None if self.residual is None else reshape(self.residual), self.decay


class MomentumSettings(NamedTuple):
    """Momentum that is applied before compression (Lin et al. 2018, DGC)."""

    momentum: float  # the factor
    clipnorm: float | None  # the norm that local gradients are clipped at


class Encoded(NamedTuple):
    """One tensor, encoded."""

    parts: list[tf.Tensor]  # the tensors that are sent
    ctx: Any  # what decoding also needs; the same on every rank
    residual: tf.Tensor | None  # the encoding error, float32 in the tensor's shape; None unless asked for
    finite: tf.Tensor  # bool scalar: whether the tensor held neither infinities nor NaN


class Compressor(Traits, horovod_compression.Compressor):
    """The base class of all compressors, including your own.

    To write one, subclass and define `compress` and `decompress`:

        class Ternary(hvdc.Compressor):
            def compress(self, tensor):
                scale = tf.reduce_max(tf.abs(tensor))
                return (tf.cast(tf.round(tensor / scale), tf.int8), scale), tensor.shape

            def decompress(self, payload, ctx):
                codes, scale = payload
                return tf.reshape(tf.cast(codes, tf.float32) * scale, ctx)

    `compress` takes a float32 tensor of static shape (in training, a flat chunk of many gradients) and returns
    `(payload, ctx)`. The payload is a tensor or a nest of tensors. Only the payload is sent; its shapes must depend on
    the tensor's shape alone, never on its values. `ctx` is whatever else `decompress` needs. It is not sent, so it must
    be the same on every rank. `decompress(payload, ctx)` returns the tensor that other ranks use in place of the
    original.

    Attributes:
        error_feedback: Whether the error of a step is stored in a residual and added to the next step's gradient. This
            requires a contraction: ||x - decompress(compress(x))|| < ||x||. Set it to False for an unbiased compressor
            with large variance.
        summable: Whether the payload is one tensor of floats that may be summed before it is decompressed; it is then
            exchanged in a plain allreduce.
        sparse: Whether most elements decode to zero, so that momentum correction makes sense.
        per_tensor: Whether it needs each gradient in its own shape rather than flat chunks.
        alignment: Chunks whose size is a multiple of this are encoded without padding; others are padded.
    """

    error_feedback: bool = True

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """The index in `stages` at this point of training; int32 scalar on the host.

        `progress` is a scalar: the steps, the epochs or the share of training so far, or a given number: see
        `counts`.
        """
        del progress
        return tf.constant(0)

    @property
    def momentum_settings(self) -> MomentumSettings | None:
        """The momentum that it applies to each rank's gradients; None for most compressors."""
        return None

    @property
    def native_format(self) -> NativeFormat | None:
        """What native operations need to know to encode and decode it; None if there are none for it."""
        return None

    @property
    def stages_in_words(self) -> str:
        """What rank 0 prints of the stages of a schedule; empty for others."""
        return ""

    def for_rows(self) -> Compressor:
        """The compressor for single rows of embeddings when dense gradients get this one; by default none."""
        return parse("none")

    def stateless(self) -> Compressor:
        """The compressor to use where neither residuals nor velocities can be stored."""
        return self

    def without_steps(self) -> Compressor:
        """Itself without the number of steps in an epoch or in training, which depends on the number of ranks."""
        return self

    def initial_factors(self, shapes: Sequence[Shape]) -> tf.Tensor | None:
        """State for tensors of these shapes, which the collective takes and returns; None for most compressors.

        It is the same on all ranks.
        """
        del shapes
        return None

    def noise_loss(self, shapes: Sequence[Shape]) -> float:
        """The share of the energy of white noise that is lost. Gradients lose less.

        Of `shapes`, those of the tensors that are exchanged together, the first counts: flat chunks are all alike.
        """
        if self.uncompressed:
            return 0.0
        noise = tf.random.stateless_normal(shapes[0], [1, 2])

        # With a residual, as in training, so that kernels are compiled once for both.
        @tf.function(autograph=False)
        def encode() -> tf.Tensor:
            return self.encode(noise, no_seeds(), tf.zeros(shapes[0]), 1.0, True).residual

        return float(tf.reduce_sum(tf.square(encode())) / tf.reduce_sum(tf.square(noise)))

    @property
    def spec(self) -> str:
        """One line that names this compressor; `hvdc.Compression.parse` reads those of registered compressors."""
        return type(self).__name__

    def __str__(self) -> str:
        return self.spec

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Compresses `tensor`; returns the payload and what else `decompress` needs."""
        raise NotImplementedError(f"{type(self).__name__} must define compress(self, tensor)")

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Returns the tensor that `payload` stands for."""
        raise NotImplementedError(f"{type(self).__name__} must define decompress(self, payload, ctx)")

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Encodes gradient + decay * residual. The residual is what earlier steps did not send.

        Args:
            gradient: float32 of static shape.
            seeds: For random choices.
            residual: float32 or bfloat16 of that shape, or None.
            decay: The residual's factor.
            keep: Whether to return what this step does not send, the new residual.
        """
        return self._encode_chunk(ChunkInput(gradient, seeds, residual, decay, keep))

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        x = chunk.sum()
        payload, ctx = self.compress(x)
        structure = tf.nest.map_structure(lambda _: 0, payload)
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(payload)]
        ctx = (structure, ctx)
        new_residual = x - tf.reshape(self.decode(parts, ctx), x.shape) if chunk.keep else None
        return Encoded(parts, ctx, new_residual, feedback.all_finite(x))

    def decode(self, parts: Sequence[tf.Tensor], ctx: Any) -> tf.Tensor:
        """Decodes one rank's parts to float32."""
        structure, inner = ctx
        return self.decompress(tf.nest.pack_sequence_as(structure, list(parts)), inner)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Any, scale: tf.Tensor) -> tf.Tensor:
        """Decodes and sums the parts of several ranks, in their order.

        `scale` (float32 scalar) multiplies every element of the sum; NaN makes all of them NaN.
        """
        total = self.decode(ranks[0], ctx)
        for parts in ranks[1:]:
            total += self.decode(parts, ctx)
        return total * scale

    def wire_bytes(self, shape: int | Sequence[int]) -> int:
        """The exact number of bytes that are sent for a tensor of this shape (or number of elements)."""
        return nbytes(self.layout(as_shape(shape)))

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The static shapes and dtypes of the parts that `encode` returns for a tensor of this shape.

        Raises:
            ValueError: They are not static.
        """
        if type(self).__hash__ is None:  # a dataclass that is not frozen
            return _traced_layout.__wrapped__(self, tuple(shape))
        return _traced_layout(self, tuple(shape))


@functools.lru_cache(maxsize=1024)
def _traced_layout(compressor: Compressor, shape: Shape) -> list[tf.TensorSpec]:
    # A tf.function: unlike a bare tf.Graph, it may use tensors and variables from outside.
    with tf.init_scope():
        encode = tf.function(lambda x: compressor.encode(x, no_seeds()).parts, autograph=False)
        parts = encode.get_concrete_function(tf.TensorSpec(shape, tf.float32)).outputs
    for part in parts:
        if not part.shape.is_fully_defined():
            raise ValueError(
                f"{compressor.spec}: compress() returned a payload of unknown shape {part.shape} for a "
                f"tensor of shape {shape}; its shape must follow from the tensor's shape alone"
            )
    return [tf.TensorSpec(part.shape, part.dtype) for part in parts]


def as_float32(tensor: Any, who: str) -> tuple[tf.Tensor, Shape, tf.DType]:
    """`tensor` as float32 with its static shape and its own dtype.

    Raises:
        TypeError: It does not hold real floating point numbers.
        ValueError: Its shape is not static.
    """
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        raise TypeError(
            f"{who} compresses floating point tensors, got {tensor.dtype.name}: cast it, or use compression='none'"
        )
    return tf.cast(tensor, tf.float32), static_shape(tensor, who), tensor.dtype


def static_shape(tensor: Any, who: str) -> Shape:
    """The shape of a tensor or variable.

    Raises:
        ValueError: It is not static.
    """
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{who} needs a tensor of static shape, got {tensor.shape}: set its shape with tf.ensure_shape before"
        )
    return tuple(tensor.shape.as_list())
