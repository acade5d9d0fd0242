"""What a compressor is."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow.compression as horovod_compression
import tensorflow as tf

from ..formats import Format
from ..formats.base import Shape, Traits, as_shape
from . import error_feedback as _residual
from . import payload as _payload
from .payload import Payload


class Seeds(NamedTuple):
    """Where randomness comes from in one step; int32 scalars and a number."""

    shared: tf.Tensor  # the same on all ranks: for choices that they must agree on
    local: tf.Tensor  # another on each rank: for noise that should average out
    chunk: int = 0  # to be folded in: each chunk draws other numbers


def no_seeds() -> Seeds:
    """The seeds of a round trip outside of training: fixed, so that it can be repeated."""
    return Seeds(tf.constant(0, tf.int32), tf.constant(0, tf.int32))


class MomentumSettings(NamedTuple):
    """Momentum in front of the compressor (Lin et al. 2018, DGC)."""

    momentum: float  # the factor
    clipnorm: float | None  # at which local gradients are clipped
    steps_per_epoch: int | None  # for a warm-up by epochs


class Encoded(NamedTuple):
    """One tensor, encoded."""

    parts: list[tf.Tensor]  # what is sent
    ctx: Any  # what decoding needs besides, the same on every rank
    residual: tf.Tensor | None  # float32 in the tensor's shape: what the parts leave out, if asked for
    finite: tf.Tensor  # bool scalar: whether the tensor had neither infinities nor NaN


class Compressor(Traits, horovod_compression.Compressor):
    """The base of all compressors, yours too.

    To write one, subclass and define `compress` and `decompress`:

        class Ternary(hvdc.Compressor):
            def compress(self, tensor):
                scale = tf.reduce_max(tf.abs(tensor))
                return (tf.cast(tf.round(tensor / scale), tf.int8), scale), tensor.shape

            def decompress(self, payload, ctx):
                codes, scale = payload
                return tf.reshape(tf.cast(codes, tf.float32) * scale, ctx)

    `compress` gets a float32 tensor of static shape (in training, a flat bucket of many gradients)
    and returns `(payload, ctx)`. The payload is a tensor or a nest of tensors and is all that other
    ranks see; its shapes must follow from the tensor's shape alone, never from its values. `ctx` is
    what `decompress` needs besides and is not sent: it must be the same on every rank.
    `decompress(payload, ctx)` returns the tensor that the others will see in place of the original.

    Attributes:
        error_feedback: Whether what a step loses is kept in a residual and added to the next step's
            gradient. That needs a contraction: ||x - decompress(compress(x))|| < ||x||. Set it to
            False for an unbiased compressor with large variance.
        summable: Whether the payload is one tensor of floats that may be summed before it is
            decompressed; it is then exchanged in a plain allreduce.
        sparse: Whether most elements decode to zero, so that momentum correction makes sense.
        per_tensor: Whether it needs each gradient in its own shape rather than flat chunks.
        alignment: Chunks whose size is a multiple of this are encoded without padding; others too.
    """

    error_feedback: bool = True

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """Which of `stages` holds when training has come so far (float64 scalar, see `Plan.progress`); int32 scalar."""
        del progress
        return tf.constant(0)

    @property
    def momentum_settings(self) -> MomentumSettings | None:
        """The momentum that it brings to each rank's gradients; None for compressors that bring none."""
        return None

    def for_rows(self) -> Compressor:
        """The compressor for single rows of embeddings where dense gradients get this one."""
        from .cast import NoCompression

        return NoCompression()

    def stateless(self) -> Compressor:
        """The compressor to use where neither residuals nor velocities can be kept."""
        return self

    def initial_factors(self, shapes: Sequence[Shape]) -> tf.Tensor | None:
        """State that is the same on all ranks and that the collective takes and returns; None where there is none.

        Args:
            shapes: Of the tensors that are exchanged together.
        """
        del shapes
        return None

    def noise_loss(self, shapes: Sequence[Shape]) -> float:
        """The share of the energy of white noise that is lost; of gradients, less is lost.

        Args:
            shapes: Of the tensors that are exchanged together; flat chunks are all alike, and the first one counts.
        """
        if self.uncompressed:
            return 0.0
        noise = tf.random.stateless_normal(shapes[0], [1, 2])

        @tf.function(autograph=False)  # with a residual, as in training: compiled once for both
        def encode() -> tf.Tensor:
            return self.encode(noise, no_seeds(), tf.zeros(shapes[0]), 1.0, True).residual

        return float(tf.reduce_sum(tf.square(encode())) / tf.reduce_sum(tf.square(noise)))

    @property
    def spec(self) -> str:
        """One line that names this compressor; those of `hvdc.Compression` parse back."""
        return type(self).__name__

    def __str__(self) -> str:
        return self.spec

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Compresses `tensor`; returns the payload and what `decompress` needs besides."""
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
        """Encodes gradient + decay * residual.

        Args:
            gradient: float32 of static shape.
            seeds: For random choices.
            residual: float32 or bfloat16 of that shape, or None.
            decay: Of the residual.
            keep: Whether the new residual is wanted.
        """
        del seeds  # randomness of its own is the subclass's business
        x = _residual.add(gradient, residual, decay)
        payload, ctx = self.compress(x)
        structure = tf.nest.map_structure(lambda _: 0, payload)
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(payload)]
        ctx = (structure, ctx)
        lost = x - tf.reshape(self.decode(parts, ctx), x.shape) if keep else None
        return Encoded(parts, ctx, lost, _residual.all_finite(x))

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
        """The exact number of bytes that a tensor of this shape (or number of elements) becomes."""
        return _payload.nbytes(self.layout(as_shape(shape)))

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The static shapes and dtypes of the parts that `encode` makes of such a tensor.

        Raises:
            ValueError: They are not static.
        """
        if type(self).__hash__ is None:  # a dataclass that is not frozen
            return _traced_layout.__wrapped__(self, tuple(shape))
        return _traced_layout(self, tuple(shape))


@functools.lru_cache(maxsize=1024)
def _traced_layout(compressor: Compressor, shape: Shape) -> list[tf.TensorSpec]:
    def parts_of(x: tf.Tensor) -> list[tf.Tensor]:
        return compressor.encode(x, no_seeds()).parts

    # A tf.function, as it may use tensors and variables from outside, which a bare tf.Graph cannot.
    with tf.init_scope():
        traced = tf.function(parts_of, autograph=False).get_concrete_function(
            tf.TensorSpec(shape, tf.float32)
        )
    parts = traced.outputs
    for part in parts:
        if not part.shape.is_fully_defined():
            raise ValueError(
                f"{compressor.spec}: compress() returned a payload of unknown shape {part.shape} for a "
                f"tensor of shape {shape}; its shape must follow from the tensor's shape alone"
            )
    return [tf.TensorSpec(part.shape, part.dtype) for part in parts]


class BuiltinCompressor(Format, Compressor):
    """A compressor of which the format says what it sends; it defines `encode` and `decode_sum`, the rest follows.

    The context is the tensor's shape, with whatever the compressor adds.
    """

    pure = True

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The static shapes and dtypes of the parts that `encode` makes of such a tensor."""
        return [tf.TensorSpec(part.shape, part.dtype) for part in self.parts(shape)]

    def decode(self, parts: Sequence[tf.Tensor], ctx: Any) -> tf.Tensor:
        """Decodes one rank's parts to float32."""
        return self.decode_sum([parts], ctx, tf.constant(1.0))

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Compresses a float tensor of static shape.

        Args:
            tensor: float16, bfloat16, float32 or float64, of any shape.

        Returns:
            The payload and the context for `decompress`.

        Raises:
            TypeError: The tensor does not hold real floating point numbers.
            ValueError: Its shape is not static.
        """
        x, shape, dtype = as_float32(tensor, self.spec)
        if math.prod(shape) == 0:
            empty = tf.zeros([0], tf.float32 if self.summable else tf.uint8)
            return (empty if self.summable else Payload(empty, self.spec)), (None, shape, dtype)
        parts, ctx, _, _ = self.encode(x, no_seeds())
        payload = parts[0] if self.summable else Payload(_payload.join(parts), self.spec)
        return payload, (ctx, shape, dtype)

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Returns the lossy tensor, in the shape and dtype of the original.

        Raises:
            TypeError: The payload is none.
            ValueError: The payload has not the length that the context calls for; eagerly, too: its indices lie outside
                of the tensor. (In a graph all of the result is NaN then.)
        """
        inner, shape, dtype = ctx
        if math.prod(shape) == 0:
            return tf.zeros(shape, dtype)
        if self.summable:
            parts = [tf.convert_to_tensor(payload)]
        else:
            parts = _payload.split(getattr(payload, "tensor", payload), self.layout(shape))
        decoded = self.decode(parts, inner)
        if tf.executing_eagerly() and _is_damaged(parts, decoded):
            raise ValueError(
                f"a payload of {self.spec} cannot be decoded: its indices are not those of a tensor of shape "
                f"{shape}; "
                "it is damaged, or was made by another compressor, for another shape or of what was not finite"
            )
        return tf.cast(tf.reshape(decoded, shape), dtype)


def _is_damaged(parts: Sequence[tf.Tensor], decoded: tf.Tensor) -> bool:
    """Whether finite values decode to NaN, as they do at indices that cannot be."""
    floats = [part for part in parts if part.dtype.is_floating]
    if len(floats) == len(parts) or not tf.math.is_nan(tf.reshape(decoded, [-1])[0]):
        return False
    return all(bool(_residual.all_finite(part)) for part in floats)


def as_float32(tensor: Any, who: str) -> tuple[tf.Tensor, Shape, tf.DType]:
    """`tensor` as float32 with its static shape and its own dtype.

    Raises:
        TypeError: It does not hold real floating point numbers.
        ValueError: Its shape is not static.
    """
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        raise TypeError(
            f"{who} compresses floating point tensors, got {tensor.dtype.name}: "
            "cast it, or use compression='none'"
        )
    return tf.cast(tensor, tf.float32), static_shape(tensor, who), tensor.dtype


def static_shape(tensor: Any, who: str) -> Shape:
    """The shape of a tensor or variable.

    Raises:
        ValueError: It is not static.
    """
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{who} needs a tensor of static shape, got {tensor.shape}: "
            "set its shape with tf.ensure_shape before"
        )
    return tuple(tensor.shape.as_list())
