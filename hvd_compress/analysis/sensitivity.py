"""Which variables suffer from compression: `hvdc.sensitivity`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..common.names import path_of
from ..compressors import Compressor, Seeds
from ..compressors.resolve import CompressionLike, resolve
from ..engine.grouping import TensorGroup
from ..engine.layout import FlatLayout, Layout, PerTensorLayout
from ..engine.packing import pack, unpack
from ..engine.settings import MIN_COMPRESS_SIZE
from ..kernels import noise
from .evaluation import Batch, Objective, Restored, batches_of
from .sensitivity_report import Row, Sensitivity

# How many learning rates are tried, each half of the one before.
_HALVINGS = 24
# Of the loss: what is less drowns in float32's rounding.
_SMALLEST_DECREASE = 1e-5


def sensitivity(
    model: Any,
    data: Any,
    compression: CompressionLike | Sequence[CompressionLike] = "hybrid:ratio=0.01,bits=4",
    loss: Any = None,
    *,
    steps: int = 16,
    learning_rate: float | None = None,
    batch_size: int = 32,
) -> Sensitivity:
    """Measures for each variable what the loss suffers when its gradient is compressed.

    1. The gradients of `steps` batches are taken, all at the model's present weights w. g is their mean.
    2. For each variable alone, they go through the compressor one after the other, as those of so many
       training steps: with a residual where the compressor calls for one. c is the mean of what was sent. Error
       feedback loses nothing, so g - c is then the last residual / steps: what is still on its way.
    3. Batches that are held out tell the loss L0 at w, L1 after the uncompressed step w - lr * g, and L2 after
       the step with c in place of g for this one variable. Its `loss_increase` is (L2 - L1) / (L0 - L1): the
       share of the step's progress that is missing.

    All variables and compressors are judged by the same gradients, batches and step: what differs between them
    is not noise. The model runs with training=False, so that the loss is a function of the weights alone, without
    the chance of dropout, and the gradient is that of the very loss that is compared. Batch normalization then
    uses its moving statistics: train a model that has some for a while first.

    Of the learning rates 2 * max(|L0|, 1) / ||g||^2 * 2**-k, k = 0 to 23, the smallest is taken that reaches half
    of their largest decrease: a step long enough to be measured, and short enough that the increases of several
    variables nearly add up.

    The share is that of plain gradient descent whose weights hardly move in `steps` steps. In faster training
    residuals count less, but in the same order. Adam and the like make up for small gradients: with them, look
    at `relative_error` too. Variables are compressed each for itself; in training those with the same compressor
    go together, and a sparse one takes more from those with large gradients.

    Nothing crosses between ranks; the result is that of this rank's data. Call it on one rank and hand the
    policy to the others: `hvd.broadcast_object(policy)`.

    Args:
        model: A Keras model: of Keras 3, `tf_keras`, or `tf.keras` of TensorFlow 2.15. Its weights and metrics have
            their old values afterwards, after an error too; its optimizer is not touched.
        data: Shuffled batches (x, y) or (x, y, sample_weight): a `tf.data.Dataset`, a Keras `PyDataset` or
            `Sequence`, or another iterable. Or a tuple of such arrays, which is shuffled (always in the same
            way) and divided. steps * 5 / 4 batches are read; of fewer, the last fifth is held out.
        compression: As `hvdc.DistributedOptimizer` takes it; or a list of them, for `policy` to choose from.
        loss: A Keras loss, its name, or a function of (y, y_pred) whose mean is taken; the model's regularization
            losses are added. None takes the loss that the model was compiled with.
        steps: How many steps are compressed. The more, the less counts what a residual holds back.
        learning_rate: lr, above 0; None finds it.
        batch_size: Samples in each batch of a tuple of arrays.

    Returns:
        A report with a row for each variable and compressor. Variables that are never compressed (of one
        dimension, or of fewer than 1024 elements) have none. An embedding's gradient is taken as dense, as
        with `sparse_as_dense=True`.

    Raises:
        TypeError: `compression` is no compressor.
        ValueError: An argument is not valid; the model has no loss or no trainable weights; data has fewer than two
            batches; a gradient or the loss is not finite; the step does not lower the loss.
    """
    candidates: Sequence[Any] = compression if isinstance(compression, (list, tuple)) else [compression]
    if not candidates:
        raise ValueError("sensitivity: compression is an empty list: name at least one compressor")
    compressors = [resolve(candidate) for candidate in candidates]
    _check_whole("steps", steps)
    _check_whole("batch_size", batch_size)
    if learning_rate is not None:
        _check_learning_rate(learning_rate)
    batches = batches_of(data, steps + math.ceil(steps / 4), batch_size)
    if len(batches) < 2:
        found = "has only one batch" if batches else "is empty"
        raise ValueError(f"sensitivity: data {found}: give two or more, so that some can be held out")
    objective = Objective(model, loss, batches[0])
    count = min(steps, max(1, len(batches) * 4 // 5))
    with Restored(model):
        return _measure(objective, batches[:count], batches[count:], compressors, learning_rate)


def _measure(
    objective: Objective,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    compressors: Sequence[Compressor],
    learning_rate: float | None,
) -> Sensitivity:
    variables = objective.variables
    # Variables of one path are measured together: no pattern tells them apart.
    paths: dict[str, list[int]] = {}
    for i, variable in enumerate(variables):
        if len(variable.shape) > 1 and math.prod(variable.shape) >= MIN_COMPRESS_SIZE:
            paths.setdefault(path_of(variable), []).append(i)
    channels = [
        (path, compressor, {i: _Channel(compressor, tuple(variables[i].shape)) for i in members})
        for path, members in paths.items()
        for compressor in compressors
    ]
    total = [tf.zeros(variable.shape) for variable in variables]
    for step, batch in enumerate(batches):
        gradient = objective.gradient(batch)
        total = [t + g for t, g in zip(total, gradient)]
        for _, _, members in channels:
            for i, channel in members.items():
                channel.send(gradient[i], step)
    mean = [t / len(batches) for t in total]
    for variable, g in zip(variables, mean):
        if not math.isfinite(_energy([g])):
            raise ValueError(
                f"sensitivity: the gradient of {path_of(variable)} is not finite: check the data and the weights"
            )
    descent = _Descent(objective, held_out, mean)
    rate = descent.search() if learning_rate is None else float(learning_rate)
    before, after = descent.loss(0.0), descent.loss(rate)
    if not before - after > _SMALLEST_DECREASE * abs(before):
        raise ValueError(
            f"sensitivity: a step of learning rate {rate:.3g} takes the held-out loss from {before:.6g} to "
            f"{after:.6g}, which is no decrease to compare with: train the model less before, or give it more data "
            "or another learning_rate"
        )
    rows = []
    for path, compressor, members in channels:
        missing = {i: channel.missing() / len(batches) for i, channel in members.items()}
        energy = _energy([mean[i] for i in members])
        rows.append(
            Row(
                path,
                sum(math.prod(variables[i].shape) for i in members),
                compressor,
                sum(channel.wire_bytes for channel in members.values()),
                math.sqrt(_energy(missing.values()) / energy) if energy else 0.0,
                (descent.loss_without(rate, missing) - after) / (before - after),
            )
        )
    rows.sort(key=lambda row: row.loss_increase, reverse=True)
    return Sensitivity(tuple(rows), len(batches), rate, before, before - after)


class _Channel:
    """One variable's gradients on their way through one compressor, in the chunks that training would make."""

    def __init__(self, compressor: Compressor, shape: tuple[int, ...]) -> None:
        bucket = TensorGroup((0,), (shape,))
        self._compressor = compressor
        self._layout: Layout = (
            PerTensorLayout(bucket) if compressor.per_tensor else FlatLayout(bucket, 1, compressor.alignment)
        )
        self._missing = [tf.zeros(chunk) for chunk in self._layout.shapes]

    @property
    def wire_bytes(self) -> int:
        """What one gradient becomes."""
        return sum(map(self._compressor.wire_bytes, self._layout.shapes))

    def send(self, gradient: tf.Tensor, step: int) -> None:
        """Compresses one step's gradient."""
        shared = noise.fold(tf.constant(step), 0)
        seeds = Seeds(shared, noise.fold(shared, 1))
        for i, chunk in enumerate(pack(self._layout, [gradient], range(len(self._missing)))):
            residual = self._missing[i] if self._compressor.error_feedback else None
            left = self._compressor.encode(chunk, seeds._replace(chunk=i), residual, 1.0, True).residual
            self._missing[i] = left if residual is not None else self._missing[i] + left

    def missing(self) -> tf.Tensor:
        """The sum of all gradients less the sum of all that was sent, float32 in the variable's shape."""
        return unpack(self._layout, self._missing, [tf.float32])[0]


class _Descent:
    """The held-out loss along a direction; moves the model's weights."""

    def __init__(
        self, objective: Objective, held_out: Sequence[Batch], gradient: Sequence[tf.Tensor]
    ) -> None:
        self._objective = objective
        self._held_out = held_out
        self._gradient = gradient
        self._start = [tf.identity(tf.convert_to_tensor(variable)) for variable in objective.variables]

    def loss(self, rate: float) -> float:
        """The loss at w - rate * g, to where it moves the weights."""
        for i, g in enumerate(self._gradient):
            self._move(i, rate, g)
        return self._objective.value(self._held_out)

    def loss_without(self, rate: float, missing: Mapping[int, tf.Tensor]) -> float:
        """The loss at w - rate * (g - missing) for some of the variables; the weights must be at w - rate * g."""
        for i, m in missing.items():
            self._move(i, rate, self._gradient[i] - m)
        loss = self._objective.value(self._held_out)
        for i in missing:
            self._move(i, rate, self._gradient[i])
        return loss

    def search(self) -> float:
        """The smallest of the learning rates with at least half of their largest decrease."""
        before, energy = self.loss(0.0), _energy(self._gradient)
        if not math.isfinite(before):
            raise ValueError("sensitivity: the held-out loss is not finite: check the data and the weights")
        if not energy:
            raise ValueError(
                "sensitivity: the gradient is zero: the loss does not depend on the trainable weights"
            )
        # Along its gradient g, a quadratic loss that is nowhere negative is lowest at 2 * loss / ||g||^2 at most.
        largest = 2.0 * max(abs(before), 1.0) / energy
        rates = [largest / 2**k for k in range(_HALVINGS)]
        decreases = [before - self.loss(rate) for rate in rates]
        enough = (rate for rate, decrease in zip(rates, decreases) if decrease >= max(decreases) / 2)
        return min(enough, default=rates[-1])

    def _move(self, i: int, rate: float, direction: tf.Tensor) -> None:
        start = self._start[i]
        self._objective.variables[i].assign(start - tf.cast(rate * direction, start.dtype))


def _energy(tensors: Iterable[tf.Tensor]) -> float:
    """The sum of squares, in float64: those of float32 overflow."""
    return sum(float(tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64)))) for tensor in tensors)


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"sensitivity: {name} must be a whole number from 1 on, got {value!r}")


def _check_learning_rate(value: Any) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0.0 < value < math.inf:
        raise ValueError(f"sensitivity: learning_rate must be a number above 0, got {value!r}")
