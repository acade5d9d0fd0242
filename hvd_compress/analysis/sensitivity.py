"""`hvdc.sensitivity`: which variables compression harms most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..common import checks
from ..common.names import path_of
from ..compressors import Compressor, Seeds
from ..compressors.resolve import CompressionLike, resolve
from ..engine.grouping import TensorGroup
from ..engine.layout import FlatLayout, Layout, PerTensorLayout
from ..engine.packing import pack, unpack
from ..engine.settings import MIN_COMPRESS_SIZE
from ..kernels import noise
from .evaluation import Batch, Objective, batches_of, restored
from .sensitivity_report import Row, Sensitivity

_WHO = "sensitivity"  # in errors
# Number of learning rates that are tried; each is half of the previous one.
_HALVINGS = 24
# Smallest decrease of the loss, relative to the loss, that float32 can measure.
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
    """Measures for each variable how much progress of the loss is missing if its gradient is compressed.

    1. It computes the gradients of `steps` batches, all at the model's present weights w. Their mean is g.
    2. For each variable, it compresses these gradients one after the other, as in so many training steps, with error
       feedback if the compressor uses it. The mean of what was sent is c. With error feedback nothing is lost:
       g - c equals the last residual / steps, which is what has not been sent yet.
    3. It evaluates the loss on held-out batches: L0 at w, L1 after the uncompressed step w - lr * g, and L2 after the
       step with c instead of g for this one variable. The result is `loss_increase` = (L2 - L1) / (L0 - L1): the share
       of the step's progress that is missing.

    All variables and compressors are compared on the same gradients, batches and step, so differences between them are
    not noise. The model runs with training=False. So the loss is a function of the weights only, without the
    randomness of dropout, and the gradients are those of the loss that is compared. Batch normalization then uses its
    moving statistics: train such a model for a while first.

    The learning rate lr is the smallest of 2 * max(|L0|, 1) / ||g||^2 * 2**-k, k = 0 to 23, that reaches half of their
    largest decrease of the loss. The step is then long enough to be measured, and short enough that the increases of
    several variables nearly add up.

    `loss_increase` is that of plain gradient descent whose weights hardly move in `steps` steps. In faster training,
    residuals matter less, but in the same order. Adam and similar optimizers scale up small gradients: with them,
    also look at `relative_error`. Each variable is compressed by itself. In training, variables with the same
    compressor share buckets, and a sparse compressor then sends more of those with large gradients.

    The function does not communicate; its result is that of this rank's data. Call it on one rank and send the policy
    to the others: `hvd.broadcast_object(policy)`.

    Example:
        report = hvdc.sensitivity(model, dataset, ["int8", "topk:ratio=0.01"])
        print(report)
        opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-3), policy=report.policy())

    Args:
        model: A model of Keras 3, of `tf_keras`, or of `tf.keras` in TensorFlow 2.15. Its weights and metrics are
            restored at the end, also after an error. Its optimizer is not used.
        data: Shuffled batches (x, y) or (x, y, sample_weight): a `tf.data.Dataset`, a Keras `PyDataset` or
            `Sequence`, or another iterable. Or a tuple of such arrays, which are shuffled (always in the same way)
            and divided into batches. steps * 5 / 4 batches are read; if there are fewer, the last fifth is held out.
        compression: A compressor as in `hvdc.DistributedOptimizer`, or a list of compressors among which `policy`
            chooses.
        loss: A Keras loss, its name, or a function of (y, y_pred) whose mean is taken. The regularization losses of the
            model are added. None uses the loss that the model was compiled with.
        steps: Number of compressed steps. The more steps, the less the final residual matters.
        learning_rate: The learning rate lr, above 0. None searches for it.
        batch_size: Samples per batch, if `data` is a tuple of arrays.

    Returns:
        A `Sensitivity` with a row for each variable and compressor. Variables that are never compressed (those with one
        dimension or with fewer than 1024 elements) have no row. The gradient of an embedding is treated as dense,
        as with `sparse_as_dense=True`.

    Raises:
        TypeError: `compression` is not a compressor.
        ValueError: An argument is not valid; the model has no loss or no trainable weights; data has fewer than two
            batches; a gradient or the loss is not finite; or the step does not lower the loss.
    """
    candidates: Sequence[Any] = compression if isinstance(compression, (list, tuple)) else [compression]
    if not candidates:
        raise ValueError("sensitivity: compression is an empty list: name at least one compressor")
    compressors = [resolve(candidate) for candidate in candidates]
    checks.integer("sensitivity: steps", steps, 1)
    checks.integer("sensitivity: batch_size", batch_size, 1)
    if learning_rate is not None and not (checks.is_number(learning_rate) and 0.0 < learning_rate < math.inf):
        raise ValueError(f"sensitivity: learning_rate must be a number above 0, got {learning_rate!r}")
    batches = batches_of(data, steps + math.ceil(steps / 4), batch_size, _WHO)
    if len(batches) < 2:
        problem = "has only one batch" if batches else "is empty"
        raise ValueError(f"sensitivity: data {problem}: give two or more, so that some can be held out")
    objective = Objective(model, loss, batches[0], _WHO)
    count = min(steps, max(1, len(batches) * 4 // 5))
    with restored(model):
        return _measure(objective, batches[:count], batches[count:], compressors, learning_rate)


def _measure(
    objective: Objective,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    compressors: Sequence[Compressor],
    learning_rate: float | None,
) -> Sensitivity:
    variables = objective.variables
    # Variables with the same path are measured together: no pattern distinguishes them.
    paths: dict[str, list[int]] = {}
    for i, variable in enumerate(variables):
        if len(variable.shape) > 1 and math.prod(variable.shape) >= MIN_COMPRESS_SIZE:
            paths.setdefault(path_of(variable), []).append(i)
    channels = [
        (path, compressor, {i: _Channel(compressor, tuple(variables[i].shape)) for i in members})
        for (path, members), compressor in itertools.product(paths.items(), compressors)
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
    """Compresses the gradients of one variable with one compressor, in the same chunks as in training."""

    def __init__(self, compressor: Compressor, shape: tuple[int, ...]) -> None:
        group = TensorGroup((0,), (shape,))
        self._compressor = compressor
        self._layout: Layout = (
            PerTensorLayout(group) if compressor.per_tensor else FlatLayout(group, 1, compressor.alignment)
        )
        self.wire_bytes = sum(map(compressor.wire_bytes, self._layout.shapes))  # of one gradient
        # Of each chunk, the sum of all gradients minus the sum of what was sent: with error feedback, the residual.
        self._missing = [tf.zeros(chunk) for chunk in self._layout.shapes]

    def send(self, gradient: tf.Tensor, step: int) -> None:
        """Compresses one step's gradient."""
        shared = noise.fold(tf.constant(step), 0)
        seeds = Seeds(shared, noise.fold(shared, 1))
        for i, chunk in enumerate(pack(self._layout, [gradient], range(len(self._missing)))):
            residual = self._missing[i] if self._compressor.error_feedback else None
            lost = self._compressor.encode(chunk, seeds._replace(chunk=i), residual, 1.0, True).residual
            self._missing[i] = lost if residual is not None else self._missing[i] + lost

    def missing(self) -> tf.Tensor:
        """Returns the sum of all gradients minus the sum of what was sent: float32, in the variable's shape."""
        return unpack(self._layout, self._missing, [tf.float32])[0]


class _Descent:
    """Evaluates the held-out loss along a direction; changes the weights of the model."""

    def __init__(self, objective: Objective, held_out: Sequence[Batch], gradient: Sequence[tf.Tensor]) -> None:
        self._objective = objective
        self._held_out = held_out
        self._gradient = gradient
        self._start = [tf.identity(tf.convert_to_tensor(variable)) for variable in objective.variables]

    def loss(self, rate: float) -> float:
        """The loss at w - rate * g; leaves the weights there."""
        for i, g in enumerate(self._gradient):
            self._move(i, rate, g)
        return self._objective.value(self._held_out)

    def loss_without(self, rate: float, missing: Mapping[int, tf.Tensor]) -> float:
        """The loss with g - missing for some variables; the weights are at w - rate * g before and after."""
        for i, m in missing.items():
            self._move(i, rate, self._gradient[i] - m)
        loss = self._objective.value(self._held_out)
        for i in missing:
            self._move(i, rate, self._gradient[i])
        return loss

    def search(self) -> float:
        """The smallest learning rate that reaches half of the largest decrease of the loss."""
        before, energy = self.loss(0.0), _energy(self._gradient)
        if not math.isfinite(before):
            raise ValueError("sensitivity: the held-out loss is not finite: check the data and the weights")
        if not energy:
            raise ValueError("sensitivity: the gradient is zero: the loss does not depend on the trainable weights")
        # A quadratic loss that is never negative has its minimum along g at 2 * loss / ||g||^2 or before.
        largest = 2.0 * max(abs(before), 1.0) / energy
        rates = [largest / 2**k for k in range(_HALVINGS)]
        decreases = [before - self.loss(rate) for rate in rates]
        enough = (rate for rate, decrease in zip(rates, decreases) if decrease >= max(decreases) / 2)
        return min(enough, default=rates[-1])

    def _move(self, i: int, rate: float, direction: tf.Tensor) -> None:
        start = self._start[i]
        self._objective.variables[i].assign(start - tf.cast(rate * direction, start.dtype))


def _energy(tensors: Iterable[tf.Tensor]) -> float:
    """The sum of squares of all elements, computed in float64, because float32 may overflow."""
    return sum(float(tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64)))) for tensor in tensors)
