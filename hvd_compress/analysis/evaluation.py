"""The loss of a Keras model and its gradients, as functions of batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# float16 would round small gradients to zero. Multiplication by a power of two is exact.
_LOSS_SCALE = 1024.0
_FORMS = "(x, y) or (x, y, sample_weight)"


class Batch(NamedTuple):
    """A batch: tensors, or nested structures of tensors, whose first dimension is that of the samples."""

    x: Any
    y: Any
    sample_weight: Any = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return int(tf.nest.flatten(self.x)[0].shape[0])


class Objective:
    """The loss that the training of a model minimizes.

    Args:
        model: A Keras model. It is built with the batch `example` if it is not built yet.
        loss: A Keras loss, its name, or a function of (y, y_pred). None uses the loss of `model.compile`.
        example: A batch.
        who: The name of the user's function, for errors.
        training: As in Keras. If False, the loss is a function of the weights only, without dropout.

    Raises:
        ValueError: There is no loss, or the model has no trainable weights.
    """

    def __init__(self, model: Any, loss: Any, example: Batch, who: str, training: bool = False) -> None:
        if loss is None and not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
            raise ValueError(f"{who}: the model is not compiled: call model.compile(loss=...) first, or pass loss=")
        if not getattr(model, "built", True):
            model(example.x, training=False)
        self.model = model
        self.variables = list(model.trainable_variables)
        if not self.variables:
            raise ValueError(f"{who}: the model has no trainable weights: set trainable = True on a layer")
        self._training = training
        self._loss = None if loss is None else tf.keras.losses.get(loss)
        eager = getattr(model, "run_eagerly", False)
        self._value = self._value_of if eager else tf.function(self._value_of, reduce_retracing=True)
        self._gradient = self._gradient_of if eager else tf.function(self._gradient_of, reduce_retracing=True)

    def value(self, batches: Sequence[Batch]) -> float:
        """The mean loss over the samples of the batches; infinite if it is not finite."""
        total = sum(batch.size * float(self._value(*batch)) for batch in batches)
        mean = total / sum(batch.size for batch in batches)
        return mean if math.isfinite(mean) else math.inf

    def gradient(self, batch: Batch) -> list[tf.Tensor]:
        """The gradient of the loss for each variable, dense, float32; zeros if the loss does not depend on it."""
        return self._gradient(*batch)

    def _value_of(self, x: Any, y: Any, sample_weight: Any) -> tf.Tensor:
        predicted = self.model(x, training=self._training)
        if self._loss is None:
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
            return tf.cast(loss, tf.float32)
        if hasattr(self._loss, "reduction"):
            loss = self._loss(y, predicted, sample_weight=sample_weight)
        else:
            loss = _weighted(tf.convert_to_tensor(self._loss(y, predicted)), sample_weight)
        return tf.add_n([tf.cast(part, tf.float32) for part in (loss, *self.model.losses)])

    def _gradient_of(self, x: Any, y: Any, sample_weight: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            scaled = _LOSS_SCALE * self._value_of(x, y, sample_weight)
        gradients = tape.gradient(scaled, self.variables)
        return [
            tf.zeros(v.shape) if g is None else tf.cast(tf.convert_to_tensor(g), tf.float32) / _LOSS_SCALE
            for g, v in zip(gradients, self.variables)
        ]


def _weighted(losses: tf.Tensor, sample_weight: Any) -> tf.Tensor:
    """The mean of `losses` ([samples, ...], or a scalar) after multiplication by the weights ([samples])."""
    losses = tf.cast(losses, tf.float32)
    if sample_weight is not None:
        ones = [1] * (losses.shape.rank - 1)
        losses *= tf.reshape(tf.cast(sample_weight, tf.float32), [-1, *ones])
    return tf.reduce_mean(losses)


def batches_of(data: Any, count: int, batch_size: int, who: str) -> list[Batch]:
    """The first `count` batches of `data`, or all batches if there are fewer.

    Args:
        data: A tuple of arrays, from which batches are drawn without replacement, always the same ones; a sequence of
            batches (a Keras PyDataset); or an iterable of batches (a tf.data.Dataset).
        count: The largest number of batches.
        batch_size: The number of samples in a batch drawn from arrays.
        who: The name of the user's function, for errors.

    Raises:
        ValueError: `data` does not consist of (x, y) or (x, y, sample_weight).
    """
    if isinstance(data, tuple):
        data = _drawn(data, count, batch_size, who)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = map(data.__getitem__, range(len(data)))
    elif not isinstance(data, Iterable):
        raise ValueError(f"{who}: data must be batches or a tuple of arrays, {_FORMS}, got {type(data).__name__}")
    return [_batch(parts, who) for parts in itertools.islice(data, count)]


def _drawn(arrays: tuple[Any, ...], count: int, batch_size: int, who: str) -> Iterator[Any]:
    leaves = [leaf for leaf in tf.nest.flatten(arrays) if leaf is not None]
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise ValueError(f"{who}: the arrays of data must have as many samples each, got {sorted(lengths)}")
    order = np.random.default_rng(0).permutation(lengths.pop())
    for start in range(0, min(len(order), count * batch_size), batch_size):
        yield tf.nest.map_structure(functools.partial(_rows, order[start : start + batch_size]), arrays)


def _rows(indices: np.ndarray, array: Any) -> Any:
    return None if array is None else np.asarray(array)[indices]


def _batch(parts: Any, who: str) -> Batch:
    if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
        raise ValueError(f"{who}: data must hold {_FORMS}, got {type(parts).__name__}")
    return Batch(*(tf.nest.map_structure(_tensor, part) for part in parts))


def _tensor(value: Any) -> Any:
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Restores the variables of a model and of its metrics at its end."""
    variables = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    saved = [(variable, tf.identity(tf.convert_to_tensor(variable))) for variable in variables]
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
